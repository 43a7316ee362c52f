"""One recurrent state per request: what a server then allocates, and that its tokens and blocks are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import Answer, assert_nothing_leaked, counted, flush, generate_all
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, RANDOM_WIDTHS, Server, dflash_server, plain_server, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"


def scratch_and_blocks(server: Server) -> tuple[int, list[tuple[list[int], int]]]:
    flush(server)
    answers = generate_all(server, corpus(PAIR, 16, 3), 8, 96)
    answers += generate_all(server, corpus(PAIR, 16, 3), 1, 96)  # prefix hits
    assert_nothing_leaked(server)
    scratch = worker_info(server)["memory_bytes"]["scratch"]
    return scratch, counted(answers)


@pytest.mark.slow
def test_a_replay_takes_a_fifth_of_the_scratch_at_most_and_the_same_blocks(
    dflash_hybrid: Server, tmp_path: Path
) -> None:
    with dflash_server(PAIR, tmp_path, base=FEATURES, SGLANG_DFLASH_STATE_REPLAY="0") as server:
        kept, expected = scratch_and_blocks(server)
        assert "replayed" not in server.log
    replayed, found = scratch_and_blocks(dflash_hybrid)
    assert "replayed" in dflash_hybrid.log
    assert replayed < 0.2 * kept
    assert found == expected


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    with plain_server(PAIR, tmp_path_factory.mktemp("plain")) as server:
        return long_answers(server)


def long_answers(server: Server) -> list[Answer]:
    """Of 4,000 tokens, four requests at once: thousands of commits on top of each other."""
    return generate_all(server, corpus(PAIR, 4, 5), 4, 4000, sampling_params={"ignore_eos": True})


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("strategy", "widths"),
    [
        ("extra_buffer", ()),
        ("extra_buffer_lazy", RANDOM_WIDTHS),
        ("no_buffer", ("--disable-overlap-schedule", *RANDOM_WIDTHS)),
    ],
    ids=["extra_buffer", "lazy, random widths", "no_buffer, random widths"],
)
def test_long_answers_are_plain_decodings(
    strategy: str, widths: tuple[str, ...], plain: list[Answer], tmp_path: Path
) -> None:
    with dflash_server(PAIR, tmp_path, "--mamba-radix-cache-strategy", strategy, *widths) as server:
        answers = long_answers(server)
        assert_nothing_leaked(server)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    assert min(len(answer.tokens) for answer in answers) == 4000
