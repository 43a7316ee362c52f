"""Greedy DFLASH gives plain decoding's tokens, one by one, whatever the scheduler does with the requests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_dflash.pairs import NAMES, drafter_kinds
from tests.support.generation import assert_nothing_leaked, flush, generate_all
from tests.support.matrix import MATRIX
from tests.support.pair_servers import dflash_server, plain_server
from tests.support.prompts import corpus
from tests.support.servers import Server

NEW_TOKENS = 64


@dataclass(frozen=True)
class Case:
    """A way to serve a pair under DFLASH."""

    pair: str
    drafter: str = "good"
    block: int = 16
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        environment = (f"{key}={value}" for key, value in self.environment)
        return " ".join((self.pair, self.drafter, str(self.block), *self.arguments, *environment))


STRATEGY = "--mamba-radix-cache-strategy"
SYNC = ("--disable-overlap-schedule",)
PAGED = ("--page-size", "16")
CHUNKED = ("--chunked-prefill-size", "64")
RETRACTED = (("SGLANG_TEST_RETRACT", "1"),)

# Every drafter at every block size; overlap, page size, chunks and retraction in turn, each with each of the others.
TURNS = itertools.cycle(
    [
        ((), ()),
        ((*SYNC, *CHUNKED), ()),
        (PAGED, RETRACTED),
        ((*SYNC, STRATEGY, "no_buffer"), ()),
        ((*PAGED, *CHUNKED), ()),
        ((), RETRACTED),
        ((*SYNC, *PAGED), ()),
        ((STRATEGY, "extra_buffer_lazy"), ()),
        ((*CHUNKED, "--enable-mixed-chunk"), ()),
    ]
)


def next_turn(pair: str, drafter: str, block: int) -> Case:
    arguments, environment = next(TURNS)
    if pair == "tiny-dense" and STRATEGY in arguments:  # refused where there are no recurrent states
        at = arguments.index(STRATEGY)
        arguments = (*arguments[:at], *arguments[at + 2 :])
    return Case(pair, drafter, block, arguments, environment)


FULL = tuple(
    next_turn(pair, drafter, block) for pair in NAMES for drafter in drafter_kinds(pair) for block in (16, 2, 8, 4)
)


def plain_tokens(server: Server, pair: str) -> list[list[int]]:
    return [answer.tokens for answer in generate_all(server, corpus(pair, 16), 8, NEW_TOKENS)]


def compare(case: Case, server: Server, expected: Sequence[Sequence[int]]) -> int:
    """Together, alone, and from the prefix cache; the number of generations compared."""
    inputs = corpus(case.pair, len(expected))
    compared = 0
    for concurrency, number in ((8, len(expected)), (1, len(expected) // 2)):
        flush(server)
        answers = generate_all(server, inputs[:number], concurrency, NEW_TOKENS)
        answers += generate_all(server, inputs[:2], concurrency, NEW_TOKENS)
        for answer, tokens in zip(answers, [*expected[:number], *expected[:2]], strict=True):
            assert answer.tokens == tokens
        # Together, requests share the chunks' budget, and a chunk may end where no recurrent state is kept.
        if concurrency == 1 and "no_buffer" not in case.arguments:
            cached = [answer.meta["cached_tokens"] for answer in answers[-2:]]
            assert max(cached) > 0, "the repeated prompts were not read from the prefix cache"
        compared += len(answers)
    assert_nothing_leaked(server)
    return compared


def start_and_compare(case: Case, folder: Path, expected: Sequence[Sequence[int]]) -> int:
    variables = dict(case.environment)
    with dflash_server(
        case.pair, folder, *case.arguments, drafter=case.drafter, block=case.block, **variables
    ) as server:
        return compare(case, server, expected)


def test_equal_tokens_without_a_sync(plain_hybrid: Server, dflash_hybrid: Server) -> None:
    assert compare(Case("tiny-hybrid"), dflash_hybrid, plain_tokens(plain_hybrid, "tiny-hybrid")) == 28


def test_equal_tokens_without_overlap_in_pages_and_chunks(tmp_path: Path) -> None:
    case = Case("tiny-dense", block=4, arguments=(*SYNC, *PAGED, *CHUNKED))
    with plain_server(case.pair, tmp_path) as server:
        expected = plain_tokens(server, case.pair)
    assert start_and_compare(case, tmp_path, expected) == 28


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=pytest.mark.xdist_group(str(case))) for case in FULL], ids=str
)
def test_equal_tokens_everywhere(case: Case, tmp_path: Path) -> None:
    finished = MATRIX.finished()
    if str(case) in finished:
        pytest.skip("passed before with this very package (tests/support/matrix.py)")
    if case.pair not in finished:
        with plain_server(case.pair, tmp_path) as server:
            MATRIX.add(case.pair, plain_tokens(server, case.pair))
    MATRIX.add(str(case), start_and_compare(case, tmp_path, MATRIX.finished()[case.pair]))
