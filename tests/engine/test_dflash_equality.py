"""Greedy DFLASH gives plain decoding's tokens, one by one, whatever the scheduler does with the requests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from sglang_dflash.pairs import NAMES, drafter_kinds
from tests.engine.dflash import assert_nothing_leaked, corpus, dflash_server, flush, generate_all, plain_server
from tests.engine.serving import Server

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

QUICK = (
    Case("tiny-hybrid", environment=(("SGLANG_DFLASH_FORBID_SYNC", "1"),)),
    Case("tiny-dense", block=4, arguments=(*SYNC, *PAGED, *CHUNKED)),
)
# Every drafter at every block size; overlap, page size, chunks and retraction in turn, each with each of the
# others.
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


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[list[int]]]]:
    """Plain decoding's tokens by pair, filled on first use."""
    yield PlainTokens(tmp_path_factory.mktemp("plain"))


class PlainTokens(dict[str, list[list[int]]]):
    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, pair: str) -> list[list[int]]:
        with plain_server(pair, self._folder) as server:
            answers = generate_all(server, corpus(pair, 16), 8, NEW_TOKENS)
        self[pair] = [answer.tokens for answer in answers]
        return self[pair]


def assert_equal(case: Case, server: Server, expected: Sequence[Sequence[int]]) -> int:
    """Alone, together, and from the prefix cache; the number of generations compared."""
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


def check(case: Case, folder: Path, plain: dict[str, list[list[int]]], record: Callable[[str, object], None]) -> None:
    expected = plain[case.pair]
    with dflash_server(
        case.pair,
        folder,
        *case.arguments,
        drafter=case.drafter,
        block=case.block,
        **dict(case.environment),
    ) as server:
        record("generations", assert_equal(case, server, expected))


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_equal_tokens(case: Case, tmp_path: Path, plain, record_property) -> None:
    check(case, tmp_path, plain, record_property)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("case", FULL, ids=str)
def test_equal_tokens_everywhere(case: Case, tmp_path: Path, plain, record_property) -> None:
    check(case, tmp_path, plain, record_property)
