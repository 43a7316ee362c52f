"""A draft window in a real server: the reference's drafts step by step, plain decoding's tokens, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.serving import DraftWindow, context_window
from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import DrafterRun, ReferenceDecoder, TargetRun
from tests.support.generation import assert_nothing_leaked, flush, generate, generate_all
from tests.support.prompts import corpus, message_ids
from tests.support.servers import (
    WIDE_WIDTHS,
    WINDOWED,
    Server,
    dflash_server,
    recorded_blocks,
    with_plugin,
    worker_info,
)

pytestmark = pytest.mark.engine

PAIR, BLOCK, NEW_TOKENS = "tiny-hybrid", 16, 64


@dataclass(frozen=True)
class Case:
    """A drafter, and server flags that begin with the draft window."""

    arguments: tuple[str, ...]
    drafter: str = "good"

    @property
    def window(self) -> int:
        return int(self.arguments[1])

    @property
    def page(self) -> int:
        return int(self.arguments[self.arguments.index("--page-size") + 1]) if "--page-size" in self.arguments else 1

    @property
    def reads(self) -> int:
        window = context_window(self.window, DrafterConfig.load(drafter_path(PAIR, self.drafter)))
        assert window is not None
        return window

    def __str__(self) -> str:
        return " ".join((self.drafter, *self.arguments[1:]))


def case(window: int, *arguments: str, drafter: str = "good") -> Case:
    return Case(("--speculative-draft-window-size", str(window), *arguments), drafter)


PAGED, CHUNKED, SYNC = ("--page-size", "16"), ("--chunked-prefill-size", "64"), ("--disable-overlap-schedule",)
CASES = (
    case(16, *SYNC, *PAGED, *CHUNKED),
    case(64, *SYNC),
    case(4096, *PAGED, *CHUNKED),
    case(4096),
    *(case(window, drafter=drafter) for window, drafter in ((16, "weak"), (64, "interleaved"), (64, "swa"))),
    case(4096, drafter="interleaved"),
    case(64, *PAGED, drafter="swa"),
)


@cache
def reference(drafter: str) -> ReferenceDecoder:
    return ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, drafter))


def check(case: Case, server: Server, probe: Path, number: int) -> None:
    assert_memory(case, server)
    prompts, accepted = corpus(PAIR, number, seed=1), 0
    flush(server)
    together = generate_all(server, prompts, len(prompts), NEW_TOKENS)
    hits = [generate(server, prompt, NEW_TOKENS) for prompt in prompts]
    for prompt, *answers in zip(prompts, together, hits, strict=True):
        wanted = reference(case.drafter).decode(prompt, NEW_TOKENS, BLOCK, draft_window=case.reads, page=case.page)
        steps = [list(step.drafted) for step in wanted.steps]
        for answer in answers:
            assert answer.tokens == wanted.tokens
            assert [block[1:] for _, block in recorded_blocks(probe, answer.meta["id"])][: len(steps)] == steps
            assert answer.meta["spec_verify_ct"] == len(steps)
        assert answers[1].meta["cached_tokens"] <= max(0, len(prompt) - case.reads)
        accepted += sum(wanted.accept_lengths) - len(steps)
    assert accepted > 0, "no draft was ever accepted"
    # A hybrid's hit ends at a recurrent state that was kept: one per chunk, the last boundary before its end.
    if CHUNKED[0] in case.arguments and case.window < 1000:
        assert max(answer.meta["cached_tokens"] for answer in hits) > 0


def assert_memory(case: Case, server: Server) -> None:
    """The drafter's pool holds a ring per request, and SGLang's padding page."""
    info, config = worker_info(server), DrafterConfig.load(drafter_path(PAIR, case.drafter))
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4  # float32
    slots = 8 * DraftWindow(case.reads, BLOCK, case.page).ring_slots(8192)
    assert info["window"] == case.reads
    assert info["memory_bytes"]["draft_kv"] == (slots + case.page) * per_token


def test_a_window_drafts_as_the_reference(windowed_hybrid: Server) -> None:
    check(Case(WINDOWED, "interleaved"), windowed_hybrid, windowed_hybrid.folder, 3)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows_of_every_kind_draft_as_the_reference(case: Case, tmp_path: Path) -> None:
    with dflash_server(
        PAIR, tmp_path, *case.arguments, drafter=case.drafter, **with_plugin(tmp_path, "drafts")
    ) as server:
        check(case, server, tmp_path, 6)
        assert_nothing_leaked(server)


def block_at(case: Case, tokens: Sequence[int], hidden: tuple[Any, ...], position: int) -> list[int]:
    """The reference's block whose anchor is ``tokens[position]``; ``hidden`` states after every layer, all tokens."""
    model = reference(case.drafter)
    drafter = DrafterRun(model.drafter, model.target, case.reads, case.page)
    drafter.inject(hidden, position)
    return [tokens[position], *drafter.draft(tokens[position], BLOCK)]


@pytest.mark.slow
@pytest.mark.parametrize("windowed", [False, True])
def test_a_block_wider_than_the_drafters_begins_with_its_drafts(windowed: bool, tmp_path: Path) -> None:
    """Copies fill the rest. They move the blocks that follow, so each is held to the reference's at its own place."""
    case_, model = case(64, *PAGED) if windowed else case(4096), reference("good")
    arguments = (*(case_.arguments if windowed else ()), *WIDE_WIDTHS)
    prompts = message_ids(PAIR, load("repeat", 4))
    with dflash_server(PAIR, tmp_path, *arguments, block=32, **with_plugin(tmp_path, "drafts")) as server:
        answers = generate_all(server, prompts, len(prompts), NEW_TOKENS)
        # All drafts, and the copy that they agree with, to its end.
        assert "32" in worker_info(server)["blocks_by_accept_length"]
        assert_nothing_leaked(server)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.plain(prompt, NEW_TOKENS)
        tokens = [*prompt, *answer.tokens]
        hidden = TargetRun(model.target).append(tokens)[1]
        # The last block may end beyond what was requested, and another one begin there.
        drafted = [
            (at, block[:BLOCK]) for at, block in recorded_blocks(tmp_path, answer.meta["id"]) if at < len(tokens)
        ]
        assert drafted == [(at, block_at(case_, tokens, hidden, at)) for at, _ in drafted]
