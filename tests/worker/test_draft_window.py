"""A draft window in a real server: the reference's drafts step by step, plain decoding's tokens, and its memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from torch import Tensor

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan.serving import DraftWindow, context_window
from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import Decoded, DrafterRun, ReferenceDecoder, TargetRun
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.pair_servers import WIDE_WIDTHS, dflash_server, recorded_blocks, with_plugin, worker_info
from tests.support.prompts import corpus, message_ids
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR, BLOCK, NEW_TOKENS = "tiny-hybrid", 16, 64


@dataclass(frozen=True)
class Case:
    """A way to serve the pair with a draft window of ``window`` tokens."""

    window: int
    arguments: tuple[str, ...] = ()
    drafter: str = "good"

    @property
    def page(self) -> int:
        return int(self.arguments[self.arguments.index("--page-size") + 1]) if "--page-size" in self.arguments else 1

    @property
    def reads(self) -> int:
        window = context_window(self.window, DrafterConfig.load(drafter_path(PAIR, self.drafter)))
        assert window is not None
        return window

    def __str__(self) -> str:
        return " ".join((str(self.window), self.drafter, *self.arguments))


PAGED, CHUNKED, SYNC = ("--page-size", "16"), ("--chunked-prefill-size", "64"), ("--disable-overlap-schedule",)
QUICK = Case(64, (*PAGED, *CHUNKED), drafter="interleaved")
SLOW = (
    Case(16),
    Case(64, SYNC),
    Case(64, (*SYNC, *CHUNKED)),
    Case(4096, (*PAGED, *CHUNKED)),
    Case(16, (*SYNC, *PAGED, *CHUNKED)),
    Case(4096),
    *(Case(window, drafter=drafter) for window in (16, 64, 4096) for drafter in ("weak", "interleaved", "swa")),
    Case(64, PAGED, drafter="swa"),
    Case(64, (*PAGED, *CHUNKED)),
)


@cache
def reference(drafter: str) -> ReferenceDecoder:
    return ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR, drafter))


def decoded(case: Case, prompt: Sequence[int]) -> Decoded:
    return reference(case.drafter).decode(prompt, NEW_TOKENS, BLOCK, draft_window=case.reads, page=case.page)


def check(case: Case, folder: Path) -> None:
    probe = folder / "probe"
    probe.mkdir()
    arguments = ("--speculative-draft-window-size", str(case.window), *case.arguments)
    prompts = corpus(PAIR, 6 if case in SLOW else 3, seed=1)
    expected = [decoded(case, prompt) for prompt in prompts]
    with dflash_server(PAIR, folder, *arguments, drafter=case.drafter, **with_plugin(probe, "drafts")) as server:
        assert_memory(case, server)
        flush(server)
        together = generate_all(server, prompts, len(prompts), NEW_TOKENS)
        hits = [generate(server, prompt, NEW_TOKENS) for prompt in prompts]
        for answers in (together, hits):
            for answer, wanted in zip(answers, expected, strict=True):
                assert answer.tokens == wanted.tokens
                steps = [list(step.drafted) for step in wanted.steps]
                assert [block[1:] for _, block in recorded_blocks(probe, answer.meta["id"])][: len(steps)] == steps
                assert answer.meta["spec_verify_ct"] == len(steps)
        for answer, prompt in zip(hits, prompts, strict=True):
            assert answer.meta["cached_tokens"] <= max(0, len(prompt) - case.reads)
        # A hybrid's hit ends at a recurrent state that was kept: one per chunk, the last boundary before its end.
        if "--chunked-prefill-size" in case.arguments and case.window < 1000:
            assert max(answer.meta["cached_tokens"] for answer in hits) > 0
        assert_nothing_leaked(server)
    assert sum(sum(wanted.accept_lengths) - len(wanted.steps) for wanted in expected) > 0, "no draft was ever accepted"


def assert_memory(case: Case, server: Server) -> None:
    """The drafter's pool holds a ring per request, and SGLang's padding page."""
    info = worker_info(server)
    config = DrafterConfig.load(drafter_path(PAIR, case.drafter))
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4  # float32
    slots = 8 * DraftWindow(case.reads, BLOCK, case.page).ring_slots(8192)
    assert info["window"] == case.reads
    assert info["memory_bytes"]["draft_kv"] == (slots + case.page) * per_token


def test_a_window_drafts_as_the_reference(tmp_path: Path) -> None:
    check(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", SLOW, ids=str)
def test_windows_of_every_kind_draft_as_the_reference(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)


def block_at(case: Case, tokens: Sequence[int], hidden: tuple[Tensor, ...], position: int) -> list[int]:
    """The reference's block whose anchor is ``tokens[position]``.

    Args:
        hidden: the target's hidden states after every layer, for all ``tokens``.
    """
    model = reference(case.drafter)
    drafter = DrafterRun(model.drafter, model.target, case.reads, case.page)
    drafter.inject(hidden, position)
    return [tokens[position], *drafter.draft(tokens[position], BLOCK)]


def assert_blocks_are_the_references_at_their_places(
    case: Case, prompts: Sequence[Sequence[int]], answers: Sequence[Answer], probe: Path
) -> None:
    model = reference(case.drafter)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.tokens == model.plain(prompt, NEW_TOKENS)
        tokens = [*prompt, *answer.tokens]
        hidden = TargetRun(model.target).append(tokens)[1]
        # The last block may end beyond what was asked for, and another one begin there.
        drafted = [(at, block[:BLOCK]) for at, block in recorded_blocks(probe, answer.meta["id"]) if at < len(tokens)]
        assert drafted == [(at, block_at(case, tokens, hidden, at)) for at, _ in drafted]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments", [(), ("--speculative-draft-window-size", "64", *PAGED)], ids=["no window", "window 64"]
)
def test_a_block_wider_than_the_drafters_begins_with_its_drafts(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """Copies fill the rest. They move the blocks that follow, so each is held to the reference's at its own place."""
    case = Case(64, PAGED) if arguments else Case(4096)
    prompts = message_ids(PAIR, load("repeat", 4))
    with dflash_server(PAIR, tmp_path, *arguments, *WIDE_WIDTHS, block=32, **with_plugin(tmp_path, "drafts")) as server:
        answers = generate_all(server, prompts, len(prompts), NEW_TOKENS)
        # All drafts, and the copy that they agree with, to its end.
        assert "32" in worker_info(server)["blocks_by_accept_length"]
        assert_nothing_leaked(server)
    assert_blocks_are_the_references_at_their_places(case, prompts, answers, tmp_path)
