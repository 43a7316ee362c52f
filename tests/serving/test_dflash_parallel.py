"""More than one rank: tensor parallelism shards target and drafter, data parallelism runs replicas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.generation import assert_nothing_leaked, flush, generate_all
from tests.support.pair_servers import RANDOM_WIDTHS, dflash_server, plain_server, worker_info
from tests.support.prompts import corpus

NEW_TOKENS = 48

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.mark.parametrize("pair", ["tiny-dense", "tiny-hybrid"])
@pytest.mark.parametrize("arguments", [("--tp-size", "2"), ("--dp-size", "2")], ids=" ".join)
def test_tokens_equal_plain_decoding_of_the_same_layout(pair: str, arguments: tuple[str, ...], tmp_path: Path) -> None:
    inputs = corpus(pair, 12, seed=4)
    with plain_server(pair, tmp_path, *arguments) as server:
        expected = [answer.tokens for answer in generate_all(server, inputs, 4, NEW_TOKENS)]
    with dflash_server(pair, tmp_path, *arguments) as server:
        for concurrency in (4, 1):
            flush(server)
            answers = generate_all(server, inputs, concurrency, NEW_TOKENS)
            assert [answer.tokens for answer in answers] == expected
        assert max(answer.meta["spec_accept_length"] for answer in answers) > 1.5
        states = server.get("/server_info").json()["internal_states"]
        if arguments[0] == "--dp-size":
            assert len(states) == 2
            for state in states:
                assert sum(state["sglang_dflash"]["steps_by_width"].values()) > 0, "a replica served nothing"
        assert_nothing_leaked(server)


@pytest.mark.parametrize("widths", [("--speculative-adaptive",), RANDOM_WIDTHS], ids=["adaptive", "random"])
def test_ranks_choose_the_same_widths(widths: tuple[str, ...], tmp_path: Path) -> None:
    """Ranks whose blocks differ would wait for each other for ever; each measures other times."""
    inputs = corpus("tiny-hybrid", 12, seed=4)
    with plain_server("tiny-hybrid", tmp_path, "--tp-size", "2") as server:
        expected = [answer.tokens for answer in generate_all(server, inputs, 4, NEW_TOKENS)]
    with dflash_server("tiny-hybrid", tmp_path, "--tp-size", "2", *widths, drafter="noisy") as server:
        for concurrency in (4, 1, 8):
            flush(server)
            answers = generate_all(server, inputs, concurrency, NEW_TOKENS)
            assert [answer.tokens for answer in answers] == expected
        info = worker_info(server)
        assert len(info["steps_by_width"]) > 1
        if widths != RANDOM_WIDTHS:
            assert info["width"]["costs"]["measured"] > 20, "rank 0's times did not arrive"
        assert_nothing_leaked(server)
