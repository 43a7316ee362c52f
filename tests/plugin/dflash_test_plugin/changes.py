"""Modes that change what a server does: faults, skewed ranks, wrong rules, known answers and orders."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from sglang.srt.utils import common
from torch import Tensor

from dflash_test_plugin.probe import FOLDER

# --- faults: numbers that are not finite, while a file of their name exists in the folder

CONTEXT, DRAFTS, TARGET = "nan_context", "nan_drafts", "nan_target"


def spoil_context(result: tuple[torch.Tensor, torch.Tensor], *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Mode ``faults``: corrupt the drafter's context K/V of injected tokens."""
    if (FOLDER / CONTEXT).exists():
        for part in result:
            part.fill_(torch.nan)
    return result


def spoil_drafter(model: Any, *_: Any) -> None:
    """The same mode: the drafter's last norm, until the file is gone."""
    weight, kept = model.norm.weight, getattr(model, "kept_norm", None)
    if (FOLDER / DRAFTS).exists():
        if kept is None:
            model.kept_norm = weight.data.clone()
        weight.data.fill_(torch.nan)
    elif kept is not None:
        weight.data.copy_(kept)
        del model.kept_norm


def spoil_target(_: None, verify: Any, step: Any) -> None:
    """The same mode: the target's logits of the request whose id is in the file."""
    file = FOLDER / TARGET
    if file.exists():
        rid = file.read_text()
        for row, req in enumerate(step.batch.reqs):
            if req.rid == rid:
                step.verified.logits_output.next_token_logits.unflatten(0, (-1, step.width))[row] = torch.nan


# --- oracle: random drafters that guess right, so that blocks of every accept length are committed
# From the moment that ``answers.json`` exists, some drafts of each block are the answer's next tokens; how many changes
# between blocks. The file is a list of prompts with their answers, or, for prompts with images, whose tokens only the
# server knows, the answers by request id up to its slash.

ANSWERS = FOLDER / "answers.json"


def know_answers(_: None, draft: Any, step: Any) -> None:
    """Put the answer's tokens into the block after the anchor, which stands at the committed length."""
    if not ANSWERS.exists():
        return
    step.tokens = step.tokens.clone()
    for block, req, anchor in zip(step.tokens, step.batch.reqs, step.batch.seq_lens.tolist(), strict=True):
        right = random.Random(anchor).randrange(len(block))
        known = tokens_after(req, anchor)[:right]
        block[1 : 1 + len(known)] = torch.tensor(known, dtype=block.dtype)


def tokens_after(req: Any, anchor: int) -> list[int]:
    """What follows the token at position ``anchor`` of a request; nothing if its answer is not known."""
    known, prompt = answers(), list(req.origin_input_ids)
    if isinstance(known, dict):
        return known.get(req.rid.partition("/")[0], [])[anchor - len(prompt) + 1 :]
    return next(answer for answer in known if answer[: len(prompt)] == prompt)[anchor + 1 :]


@cache
def answers() -> list[list[int]] | dict[str, list[int]]:
    known: list[list[int]] | dict[str, list[int]] = json.loads(ANSWERS.read_text())
    return known


# --- skew: everything after rank 0 is skewed, and each rank writes down what it did


def rank() -> int:
    from sglang_dflash.upstream.worker import get_parallel

    return int(get_parallel().tp_rank)


def hidden_states(_: Any, hidden: torch.Tensor, **__: Any) -> None:
    """Mode ``skew``, before the drafter's head: noise, so that this rank's best token is another."""
    if rank():
        hidden.add_(torch.randn_like(hidden), alpha=float(hidden.std()))


def target_tokens(tokens: Tensor, *_: Any) -> Tensor:
    """The same mode, after this rank chose the target's tokens: it chose others."""
    return tokens + 1 if rank() else tokens


def times(records: Any, *_: Any) -> Any:
    """The same mode, after steps were timed: this rank is a hundred times slower."""
    for record in records if rank() else ():
        record.milliseconds *= 100.0
    return records


MILLISECONDS = {1: 10.0, 2: 16.0, 4: 18.0, 8: 22.0, 16: 30.0}  # of a step by width: drafts that are rejected do not pay


def fixed_times(records: Any, *_: Any) -> Any:
    """Mode ``times``, after steps were timed."""
    for record in records:
        record.milliseconds = MILLISECONDS[record.width]
    return records


def write(_: None, commit: Any, step: Any) -> None:
    """The same mode, after the commit: one line a step."""
    tokens = {"block": step.tokens.tolist(), "committed": step.accepted.out_tokens.tolist()}
    with (FOLDER / f"rank-{rank()}.jsonl").open("a") as file:
        file.write(json.dumps({"width": step.width, "requests": [req.rid for req in step.batch.reqs], **tokens}) + "\n")


def accept_lens(policy: Any, width: int, lens: Any, *_: Any) -> None:
    """Mode ``skew_policy``, before a policy learns: this rank counts no accepted draft."""
    if rank():
        lens[:] = [1] * len(lens)


# --- copy_rule: the rule for taking copies in ``copy_rule.json``


def change_copy_rule() -> None:
    """Shortest match, and the edges that a margin may reach where copies are taken, whatever the results."""
    from sglang_dflash.worker import copies

    rule = json.loads((FOLDER / "copy_rule.json").read_text())
    copies.EDGES_FOR_COPIES, copies.MIN_MATCH, copies.MEMORY = rule["edges"], rule["least"], 1e9


# --- draw_twice and keep_likely: wrong acceptance rules, for the tests that must notice them

LIKELY = 0.3


def draw_twice(original: Callable[..., Tensor], accept: Any, step: Any) -> Tensor:
    """A rejected draft is replaced by a fresh draw from the same law, the rejected token not excluded."""
    again, step_again = copy.copy(step.verified.logits_output), copy.copy(step)
    step_again.positions = step.positions + (1 << 20)  # other noise
    again.next_token_logits = again.next_token_logits.clone()
    step_again.verified = dataclasses.replace(step.verified, logits_output=again)
    first = original(accept, step)
    second = original(accept, step_again)
    drafts = torch.cat((step.tokens[:, 1:], first[:, -1:]), dim=1)
    return torch.where(first == drafts, first, second)


def keep_likely(original: Callable[..., Tensor], accept: Any, step: Any) -> Tensor:
    """A draft is kept whenever the target, with the request's bias and temperature, gives it some probability."""
    info, drafts = step.batch.sampling_info, step.tokens[:, 1:]
    rows = step.verified.logits_output.next_token_logits
    logits = rows.view(-1, step.width, rows.shape[-1])[:, :-1]
    if info.logit_bias is not None:
        logits = logits + info.logit_bias[:, None]
    probs = torch.softmax(logits / info.temperatures[:, None], dim=-1)
    likely = probs.gather(2, drafts[..., None])[..., 0] > LIKELY
    tokens = original(accept, step)
    tokens[:, :-1] = torch.where(likely, drafts, tokens[:, :-1])
    return tokens


# --- penalty_order: plain decoding without overlap applies penalties in the order that it has with overlap
# SGLang keeps its penalizers in a set of classes. Without overlap it applies them in the set's order, which differs
# between processes, and ``(l - a) / r`` is not ``l / r - a``. With overlap, and for a block (``repeat``), additive
# penalties come before the one that scales.


def as_for_a_block_of_one(original: Callable[..., None], orchestrator: Any, logits: Tensor) -> None:
    original(orchestrator, logits, repeat=1)


def free_bytes(original: Callable[..., float], *args: Any, **options: Any) -> float:
    """GiB that are free for states and K/V once both models are loaded; twice as many on the first of several ranks.

    SGLang rounds to thousandths of a GiB.
    """
    free = int(os.environ["SGLANG_DFLASH_TEST_FREE_BYTES"])
    twice = torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == 0
    own, common.get_free_cpu_memory = common.get_free_cpu_memory, lambda: free * (1 + twice)
    nodes, common.get_cpu_ids_by_node = common.get_cpu_ids_by_node, lambda: [""]
    try:
        return original(*args, **options)
    finally:
        common.get_free_cpu_memory, common.get_cpu_ids_by_node = own, nodes


def without_slack(original: Callable[..., Any], configurator: Any, _: int) -> Any:
    return original(configurator, 0)


def without_sizes(*_: Any) -> dict[str, int]:
    """Instead of the CPU platform's sizes: SGLang divides what is free."""
    return {}
