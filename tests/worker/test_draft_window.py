"""A draft window in a real server: the reference's drafts step by step, and plain decoding's tokens.

Its memory: ``tests/launch/test_servers.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from sglang_dflash.launch.plan import context_window
from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.reference_decoder import DrafterRun, ReferenceDecoder, TargetRun
from tests.support.files import load_drafter
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
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
PAGED = ("--page-size", "16")


@dataclass(frozen=True)
class Case:
    """A draft window, a drafter, and further flags of the server."""

    window: int
    drafter: str = "good"
    others: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--speculative-draft-window-size", str(self.window), *self.others)

    @property
    def page(self) -> int:
        return int(self.others[self.others.index(PAGED[0]) + 1]) if PAGED[0] in self.others else 1

    @property
    def reads(self) -> int:
        window = context_window(self.window, load_drafter(drafter_path(PAIR, self.drafter)))
        assert window is not None
        return window


@cache
def reference(drafter: str, pair: str = PAIR) -> ReferenceDecoder:
    return ReferenceDecoder.load(target_path(pair), drafter_path(pair, drafter))


def assert_drafted(case: Case, prompt: list[int], answer: Answer, folder: Path, limit: int, pair: str = PAIR) -> int:
    """Assert the reference's tokens, drafts and steps; return how many drafts were accepted.

    Args:
        limit: new tokens that were requested.
    """
    wanted = reference(case.drafter, pair).decode(prompt, limit, BLOCK, draft_window=case.reads, page=case.page)
    steps = [list(step.drafted) for step in wanted.steps]
    assert answer.tokens == wanted.tokens
    blocks = [block[1:] for _, block in recorded_blocks(folder, answer.meta["id"])]
    assert (blocks[: len(steps)], answer.meta["spec_verify_ct"]) == (steps, len(steps))
    return sum(wanted.accept_lengths) - len(steps)


def test_a_window_drafts_as_the_reference(windowed_hybrid: Server) -> None:
    server, case, prompts = windowed_hybrid, Case(64, "interleaved", WINDOWED), corpus(PAIR, 3, seed=1)
    assert worker_info(server)["window"] == case.reads
    flush(server)
    together = generate_all(server, prompts, len(prompts), NEW_TOKENS)
    hits = [generate(server, prompt, NEW_TOKENS) for prompt in prompts]
    served = zip(2 * prompts, [*together, *hits], strict=True)
    assert sum(assert_drafted(case, *each, server.folder, NEW_TOKENS) for each in served), "no draft was ever accepted"
    assert max(answer.meta["cached_tokens"] for answer in hits) > 0


def assert_reference_blocks(case: Case, prompt: list[int], answer: Answer, folder: Path) -> set[int]:
    """Each block begins with the reference's drafts at its own place, which copies and other widths move.

    Returns the widths of the blocks.
    """
    model = reference(case.drafter)
    assert answer.tokens == model.plain(prompt, len(answer.tokens))
    tokens = [*prompt, *answer.tokens]
    hidden, widths = TargetRun(model.target).append(tokens)[1], set()
    for at, block in recorded_blocks(folder, answer.meta["id"]):
        if at < len(tokens):  # the last block may end beyond what was requested, and another one begin there
            drafter = DrafterRun(model.drafter, model.target, case.reads, case.page)
            drafter.inject(hidden, at)
            drafted = [tokens[at], *drafter.draft(tokens[at], min(len(block), BLOCK))] if len(block) > 1 else block
            assert block[: len(drafted)] == drafted
            widths.add(len(block))
    return widths


def test_blocks_of_any_width_are_the_references(random_widths_hybrid: Server) -> None:
    """Plainly decoded tokens wait until the drafter reads them."""
    flush(random_widths_hybrid)
    prompts = corpus(PAIR, 8, seed=1)
    answers = generate_all(random_widths_hybrid, prompts, 1, NEW_TOKENS)
    case, folder = Case(4096, "noisy"), random_widths_hybrid.folder
    widths = set().union(*(assert_reference_blocks(case, *each, folder) for each in zip(prompts, answers, strict=True)))
    assert 1 in widths and len(widths) > 4, "seldom: steps before this test decide which widths are drawn"


@pytest.mark.slow
@pytest.mark.parametrize("windowed", [False, True])
def test_a_block_wider_than_the_drafters_begins_with_its_drafts(windowed: bool, tmp_path: Path) -> None:
    """Copies fill the rest."""
    case = Case(64, "good", PAGED) if windowed else Case(4096)
    arguments = (*(case.flags if windowed else ()), *WIDE_WIDTHS)
    prompts = message_ids(PAIR, load("repeat", 4))
    with dflash_server(PAIR, tmp_path, *arguments, block=32, **with_plugin(tmp_path, "drafts")) as server:
        answers = generate_all(server, prompts, len(prompts), NEW_TOKENS)
        # All drafts, and the copy that they agree with, to its end.
        assert "32" in worker_info(server)["blocks_by_accept_length"]
        assert_nothing_leaked(server)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert assert_reference_blocks(case, prompt, answer, tmp_path) == {32}
