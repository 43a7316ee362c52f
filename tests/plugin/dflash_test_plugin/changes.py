"""Modes that change what a server does: faults, skewed ranks, wrong rules, known answers and orders."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import signal
import time
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from sglang.srt.utils import common
from torch import Tensor

from dflash_test_plugin.known import right_drafts
from dflash_test_plugin.probe import COMMIT, DRAFT, FOLDER, _hook, _rank, _write

_CHOOSE = "sglang_dflash.worker.accept.Accept.target_tokens"
_TIMES = "sglang_dflash.step.flight.Flight.times"
# Per step and width: rejected drafts do not pay.
_MILLISECONDS = {1: 10.0, 2: 16.0, 4: 18.0, 8: 22.0, 12: 26.0, 16: 30.0}


def faults() -> None:
    """Numbers that are not finite, while a file of their name exists in the folder.

    ``nan_context``: the drafter's context K/V of injected tokens; ``nan_drafts``: its output; ``nan_target``: the
    target's logits of the request whose id is in the file.
    """

    def spoil_context(result: tuple[Tensor, Tensor], *_: Any) -> tuple[Tensor, Tensor]:
        if (FOLDER / "nan_context").exists():
            for part in result:
                part.fill_(torch.nan)
        return result

    def spoil_drafter(_: Any, anchors: Tensor, masks: Tensor, *__: Any) -> None:
        if (FOLDER / "nan_drafts").exists():
            masks.fill_(torch.nan)

    def spoil_target(_: None, verify: Any, step: Any) -> None:
        file = FOLDER / "nan_target"
        rids = [req.rid for req in step.batch.reqs]
        if file.exists() and (rid := file.read_text()) in rids:
            logits = step.verified.logits_output.next_token_logits
            logits.unflatten(0, (-1, step.width))[rids.index(rid)] = torch.nan

    _hook("AFTER", "sglang_dflash.model.drafter.DFlashDraftModel.context_kv", spoil_context)
    _hook("BEFORE", "sglang_dflash.model.vocabulary.TargetVocabulary.likeliest", spoil_drafter)
    _hook("AFTER", "sglang_dflash.worker.forwards.Verify.verify", spoil_target)


def dies() -> None:
    """``SGLANG_DFLASH_TEST_DIES``: when and at which function the process is killed, once the file ``dies`` exists."""

    def die(*_: Any, **__: Any) -> None:
        if (FOLDER / "dies").exists():
            os.kill(os.getpid(), signal.SIGKILL)

    when, target = os.environ["SGLANG_DFLASH_TEST_DIES"].split()
    _hook(when, target, die)


def surroundings() -> None:
    """``clock``: the seconds by which the machine's clock has jumped; ``full``: the disk under the log is full."""
    own = time.time

    def jumped() -> float:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return own() + float((FOLDER / "clock").read_text())
        return own()

    def fill(*_: Any, **__: Any) -> None:
        if (FOLDER / "full").exists():
            for descriptor in (1, 2):
                os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)

    time.time = jumped
    for target in ("scheduler.Scheduler.get_next_batch_to_run", "tokenizer_manager.TokenizerManager.generate_request"):
        _hook("BEFORE", f"sglang.srt.managers.{target}", fill)


def oracle() -> None:
    """Random drafters guess right, so that blocks of every accept length are committed.

    Once ``answers.json`` exists, :func:`right_drafts` of each block are the answer's next tokens, and the next one is
    wrong. The file is a list of prompts with their answers, or, for prompts with images, whose tokens only the server
    knows, the answers by request id up to its slash.
    """

    @cache
    def answers() -> Any:
        return json.loads((FOLDER / "answers.json").read_text())

    def tokens_after(req: Any, anchor: int) -> list[int]:
        known, prompt = answers(), list(req.origin_input_ids)
        if isinstance(known, dict):
            return list(known.get(req.rid.partition("/")[0], [])[anchor - len(prompt) + 1 :])
        return list(next((answer for answer in known if answer[: len(prompt)] == prompt), prompt)[anchor + 1 :])

    def know_answers(_: None, draft: Any, step: Any) -> None:
        if (FOLDER / "answers.json").exists():
            step.tokens = step.tokens.clone()
            for block, req, anchor in zip(step.tokens, step.batch.reqs, step.batch.seq_lens.tolist(), strict=True):
                following, right = tokens_after(req, anchor)[: len(block) - 1], right_drafts(anchor, len(block))
                known = [*following[:right], *(int(not token) for token in following[right : right + 1])]
                block[1 : 1 + len(known)] = torch.tensor(known, dtype=block.dtype)

    _hook("AFTER", DRAFT, know_answers)


def skew() -> None:
    """Ranks after rank 0 draft other tokens, choose other target tokens and are slower.

    ``rank-<rank>.jsonl``: what each rank drafted and committed, per step.
    """

    def hidden_states(_: Any, hidden: Tensor, *__: Any) -> None:
        if _rank():
            hidden.add_(torch.randn_like(hidden), alpha=float(hidden.std()))

    def record(_: None, commit: Any, step: Any) -> None:
        tokens = {"block": step.tokens.tolist(), "committed": step.accepted.out_tokens.tolist()}
        _write(f"rank-{_rank()}.jsonl", width=step.width, requests=[req.rid for req in step.batch.reqs], **tokens)

    _hook("BEFORE", "sglang_dflash.model.vocabulary.TargetVocabulary.top_k", hidden_states)
    _hook("AFTER", _CHOOSE, lambda tokens, *_: tokens + 1 if _rank() else tokens)
    _hook("AFTER", COMMIT, record)
    skew_times()


def skew_times() -> None:
    """Ranks after rank 0 are a hundred times slower."""

    def slow(steps: Any, *_: Any) -> Any:
        return [dataclasses.replace(step, milliseconds=100 * step.milliseconds) for step in steps] if _rank() else steps

    _hook("AFTER", _TIMES, slow)


def times() -> None:
    """Steps of a width take the same time, those of the calibration too."""

    def fix(steps: Any, *_: Any) -> Any:
        return [dataclasses.replace(step, milliseconds=_MILLISECONDS[step.width]) for step in steps]

    _hook("AFTER", _TIMES, fix)
    calibrated = "sglang_dflash.worker.start.calibration.step_times"
    _hook("AFTER", calibrated, lambda cells, *_: {cell: _MILLISECONDS[cell[1]] for cell in cells})


def copy_rule() -> None:
    """``copy_rule.json``: the shortest match, and the margin below which copies are taken."""
    from sglang_dflash.features import copies

    rule = json.loads((FOLDER / "copy_rule.json").read_text())
    copies.MIN_MATCH, copies.MARGIN = rule["least"], rule["margin"]


def no_copies() -> None:
    """An adaptive width whose server copies nothing."""

    def leave_out(worker: Any) -> None:
        worker.plan = dataclasses.replace(worker.plan, copies=False)

    _hook("BEFORE", "sglang_dflash.worker.worker.DFlashWorker._build_features", leave_out)


def draw_twice() -> None:
    """A wrong rule: a rejected draft is replaced by a fresh draw from the same law, the rejected token not excluded."""

    def draw(original: Callable[..., Tensor], accept: Any, step: Any) -> Tensor:
        again, step_again = copy.copy(step.verified.logits_output), copy.copy(step)
        step_again.positions = step.positions + (1 << 20)  # other noise
        again.next_token_logits = again.next_token_logits.clone()
        step_again.verified = dataclasses.replace(step.verified, logits_output=again)
        first, second = original(accept, step), original(accept, step_again)
        drafts = torch.cat((step.tokens[:, 1:], first[:, -1:]), dim=1)
        return torch.where(first == drafts, first, second)

    _hook("AROUND", _CHOOSE, draw)


def penalty_order() -> None:
    """Plain decoding without overlap applies penalties in the order that it has with overlap.

    SGLang keeps its penalizers in a set of classes. Without overlap it applies them in the set's order, which differs
    between processes, and ``(l - a) / r`` is not ``l / r - a``. With overlap, and for a block (``repeat``), additive
    penalties come before the one that scales.
    """
    target = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"
    _hook("AROUND", target, lambda original, orchestrator, logits: original(orchestrator, logits, repeat=1))


def free_bytes() -> None:
    """The bytes of ``SGLANG_DFLASH_TEST_FREE_BYTES`` are free for states and K/V, twice as many on the first rank.

    SGLang rounds to thousandths of a GiB, and divides them itself: without its slack and the CPU platform's sizes.
    """

    def free(original: Callable[..., float], *args: Any, **options: Any) -> float:
        least = int(os.environ["SGLANG_DFLASH_TEST_FREE_BYTES"])
        twice = torch.distributed.get_world_size() > 1 and torch.distributed.get_rank() == 0
        own, common.get_free_cpu_memory = common.get_free_cpu_memory, lambda: least * (1 + twice)
        nodes, common.get_cpu_ids_by_node = common.get_cpu_ids_by_node, lambda: [""]
        try:
            return original(*args, **options)
        finally:
            common.get_free_cpu_memory, common.get_cpu_ids_by_node = own, nodes

    module = "sglang.srt.mem_cache.kv_cache_configurator"
    _hook(
        "AROUND",
        f"{module}.KVCacheConfigurator._profile_available_bytes",
        lambda original, configurator, _: original(configurator, 0),
    )
    _hook("AROUND", f"{module}.get_available_gpu_memory", free)
    _hook("REPLACE", "sglang_dflash_cpu.arguments._defaults", lambda *_: {})


def headers() -> None:
    """A request's header ``x-regex`` is a pattern of its answer; ``x-tool-parser`` replaces the server's parsers."""
    asked = {name: ContextVar(name, default="") for name in ("x-regex", "x-tool-parser")}

    def read(app: Any) -> Any:
        async def with_headers(scope: Any, receive: Any, send: Any) -> None:
            sent = {name.decode(): value.decode("unicode_escape") for name, value in scope.get("headers", ())}
            for name, variable in asked.items():
                variable.set(sent.get(name, ""))
            await app(scope, receive, send)

        return with_headers

    def add(*_: Any, **__: Any) -> None:
        from sglang.srt.entrypoints.http_server import app
        from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

        app.add_middleware(read)

        def parser(name: str, replaced: Callable[[str], str | None]) -> property:
            def read(chat: Any) -> str | None:
                other = asked["x-tool-parser"].get()
                return replaced(other) if other else vars(chat)[name]

            return property(read, lambda chat, value: vars(chat).update({name: value}))

        OpenAIServingChat.tool_call_parser = parser(
            "tool_call_parser", lambda other: None if other == "none" else other
        )
        OpenAIServingChat.reasoning_parser = parser(
            "reasoning_parser", lambda other: None if other == "none" else "qwen3"
        )

    def answer(_: Any, obj: Any, *__: Any, **___: Any) -> None:
        if pattern := asked["x-regex"].get():
            obj.sampling_params = {**(obj.sampling_params or {}), "regex": pattern}
            obj.require_reasoning = False

    _hook("BEFORE", "sglang.srt.entrypoints.http_server._setup_and_run_http_server", add)
    _hook("BEFORE", "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", answer)
