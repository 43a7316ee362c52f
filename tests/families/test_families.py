"""Targets of every family are served: their own greedy tokens, in the steps that the drafts allow, and a drafter that
reads the right layers.

Drafts are random first. Then the mode ``oracle`` makes a known number of each block's drafts right, so the number of
steps is known. Equal tokens cannot show a wrong capture: the captured layers, of a prompt and of verified blocks, are
compared with transformers' hidden states.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.families.pairs import TARGETS, VOCAB, Pair, build
from tests.plugin.dflash_test_plugin.known import right_drafts
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.servers import (
    RANDOM_WIDTHS,
    RETRACTED,
    Server,
    draft_arguments,
    running,
    with_plugin,
    worker_info,
)

pytestmark = pytest.mark.engine

NEW_TOKENS = 40
STATES: dict[str, Any] = {"return_hidden_states": True}
STATES |= {"sampling_params": {"custom_params": {"hidden_states": "target_layers"}}}
BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8", "--max-total-tokens", "16384")
BASE += ("--enable-return-hidden-states", "--enable-metrics")
SMALL_POOL = ("--swa-full-tokens-ratio", "0.05")  # 819 tokens of sliding K/V
HARD = ("--page-size", "16", "--chunked-prefill-size", "64", "--speculative-draft-window-size", "64")


@dataclass(frozen=True)
class Cell:
    """A way to serve a family."""

    target: str
    block: int = 16
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        flags = (Path(flag).name.removeprefix("--") for flag in self.flags)
        return " ".join((self.target, str(self.block), *flags, *(key for key, _ in self.environment)))

    @property
    def retracts(self) -> bool:
        """Whether requests start again: their hidden states then hold the prompt twice."""
        return bool(self.environment) or SMALL_POOL[0] in self.flags

    @property
    def steps_are_known(self) -> bool:
        """Whether every token after the first comes from a verify of a full block."""
        return not self.retracts and RANDOM_WIDTHS[0] not in self.flags


# One short server per mechanism: sinks and sliding layers; two shapes of K/V, soft cap; latent K/V
SHORT = tuple(map(Cell, ("gpt_oss", "gemma4_text", "deepseek_v3")))
EACH = tuple(Cell(name, 4) for name in TARGETS)
RETRACTS = tuple(RETRACTED.items())
RANDOM = RANDOM_WIDTHS, RETRACTS
TWO_RANKS = ("--tp-size", "2")
MECHANISMS = tuple(cell.target for cell in SHORT)
STRESSED = (
    Cell("gpt_oss", 16, HARD),
    Cell("gpt_oss", 16, SMALL_POOL),
    Cell("gpt_oss", 16, *RANDOM),
    Cell("gemma4_text", 16, HARD),
    Cell("gemma4_text of experts", 16, *RANDOM),
    Cell("glm4_moe_lite", 4, HARD, RETRACTS),
    Cell("deepseek_v3", 16, *RANDOM),
    *(Cell(name, 16, TWO_RANKS) for name in (*MECHANISMS, "minimax_m2")),  # whose norms span all heads
)


def prompts(number: int) -> list[list[int]]:
    """Return random prompts, one that repeats itself and one that continues another."""
    draw = random.Random(0)
    found = [draw.choices(range(10, VOCAB - 10), k=length) for length in (130, 3, 65, 220, 16, 31, 64, 300, 17, 420)]
    found = found[: number - 2]
    return [*found, draw.choices(range(10, VOCAB - 10), k=13) * 9, found[0][:100] + [11, 12, 13]]


def ask(server: Server, inputs: list[list[int]], concurrency: int = 8, **body: Any) -> list[Answer]:
    sampling = {"ignore_eos": True, **body.pop("sampling_params", {})}
    return generate_all(server, inputs, concurrency, NEW_TOKENS, sampling_params=sampling, **body)


def steps(prompt: list[int], block: int) -> int:
    """Return the blocks that generate an answer under the mode ``oracle``."""
    anchor, last, number = len(prompt), len(prompt) + NEW_TOKENS - 1, 0
    while anchor < last:
        anchor += min(right_drafts(anchor, block), last - anchor) + 1
        number += 1
    return number


def compare(pair: Pair, cell: Cell, server: Server, number: int) -> None:
    first = prompts(number)
    drafted = ask(server, first)
    turns = [[*prompt, *answer.tokens[:-7], 11, 12] for prompt, answer in zip(first, drafted, strict=True)]
    following = ask(server, turns)
    hits = [answer.meta["cached_tokens"] for answer, turn in zip(following, turns, strict=True) if len(turn) > 150]
    assert all(hits) or cell.retracts
    texts = [[*p, *answer.tokens] for p, answer in zip([*first, *turns], [*drafted, *following], strict=True)]
    (server.folder / "answers.json").write_text(json.dumps(texts))
    states = {} if cell.retracts else STATES
    for asked, expected in ((first, drafted), (turns, following)):
        flush(server)
        for prompt, answer, other in zip(asked, ask(server, asked, **states), expected, strict=True):
            assert answer.tokens == other.tokens
            assert_targets_own(pair, prompt, answer)
            if cell.steps_are_known:
                assert answer.meta["spec_verify_ct"] == steps(prompt, cell.block)
    again = ask(server, [*first, *turns[:2]], 1)  # alone, from the prefix cache
    assert [answer.tokens for answer in again] == [answer.tokens for answer in [*drafted, *following[:2]]]


def assert_targets_own(pair: Pair, prompt: list[int], answer: Answer) -> None:
    """Assert that each token is the target's argmax, and that the captured layers are its own."""
    logits, layers = pair.read([*prompt, *answer.tokens[:-1]])
    own = logits[len(prompt) - 1 :]
    top = own.topk(2)
    for step, token in enumerate(answer.tokens):
        assert token == top.indices[step, 0], (len(prompt), step, top.values[step].diff())
    if "hidden_states" not in answer.meta:
        return
    first, *others = answer.meta["hidden_states"]
    found = torch.tensor([*first, *others])
    expected = layers[-len(found) :]
    assert len(others) == NEW_TOKENS - 1 and found.shape == expected.shape
    largest = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found / largest, expected / largest, rtol=0, atol=1e-4)


def serve_and_compare(cell: Cell, folder: Path, number: int) -> None:
    pair, environment = build(cell.target, folder), {**with_plugin(folder, "oracle"), **dict(cell.environment)}
    command = ("--model-path", str(folder / "target"), *BASE, *draft_arguments("", folder / "drafter", cell.block))
    with running(folder, *command, *cell.flags, **environment) as server:
        assert worker_info(server)["block_size"] == cell.block
        compare(pair, cell, server, number)
        assert "sglang_dflash:steps_total" in server.get("/metrics").text
        assert_nothing_leaked(server)


@pytest.mark.parametrize("cell", SHORT, ids=str)
def test_a_mechanism(cell: Cell, tmp_path: Path) -> None:
    serve_and_compare(cell, tmp_path, 5)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("cell", (*EACH, *STRESSED), ids=str)
def test_a_family(cell: Cell, tmp_path: Path) -> None:
    serve_and_compare(cell, tmp_path, 12)
