"""One recurrent state per request: what a server then allocates, and that its tokens and blocks are the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import Answer, assert_nothing_leaked, generate_all
from tests.support.memory import allocated
from tests.support.pair_servers import RANDOM_WIDTHS, dflash_server, draft_arguments, plain_server, target_arguments
from tests.support.prompts import corpus
from tests.support.servers import Server, run_to_exit

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
KEPT = {"SGLANG_DFLASH_STATE_REPLAY": "0"}


def tokens_and_blocks(answers: list[Answer]) -> list[tuple[list[int], int]]:
    return [(answer.tokens, answer.meta["spec_verify_ct"]) for answer in answers]


def test_a_replay_takes_a_fifth_of_the_scratch_at_most_and_the_same_blocks(tmp_path: Path) -> None:
    found = {}
    for way, environment in (("kept", KEPT), ("replayed", {})):
        folder = tmp_path / way
        folder.mkdir()
        with dflash_server(PAIR, folder, "--mamba-radix-cache-strategy", "extra_buffer", **environment) as server:
            answers = generate_all(server, corpus(PAIR, 16, 3), 8, 96)
            answers += generate_all(server, corpus(PAIR, 16, 3), 1, 96)  # prefix hits
            found[way] = allocated(server)["scratch"], tokens_and_blocks(answers), server.log
            assert_nothing_leaked(server)
    assert found["replayed"][0] < 0.2 * found["kept"][0]
    assert found["replayed"][1] == found["kept"][1]
    assert "replayed" in found["replayed"][2]


def test_a_ring_that_is_too_short_is_refused_before_weights_load() -> None:
    short = ("--linear-replayssm-cache-len", "8")
    status, log = run_to_exit(*target_arguments(PAIR), *draft_arguments(PAIR), *short)
    assert status != 0
    assert "a power of two, at least 16 for blocks of 16" in log
    assert "Load weight" not in log


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
