"""More than one rank: tensor parallelism shards target and drafter, data parallelism runs replicas."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from sglang_dflash_lab.bench.tasks import load
from tests.support.generation import assert_nothing_leaked, flush, generate_all
from tests.support.pair_servers import dflash_server, plain_server, with_plugin, worker_info
from tests.support.prompts import corpus, message_ids
from tests.support.servers import Server

NEW_TOKENS = 48
VOCABULARY = 1024  # of the tiny pairs

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_two_replicas_in_a_server_answer_as_plain_decoding(plain_hybrid: Server, tmp_path: Path) -> None:
    inputs = corpus("tiny-hybrid", 12, seed=4)
    expected = [answer.tokens for answer in generate_all(plain_hybrid, inputs, 4, NEW_TOKENS)]
    with dflash_server("tiny-hybrid", tmp_path, "--dp-size", "2") as server:
        for concurrency in (4, 1):
            flush(server)
            answers = generate_all(server, inputs, concurrency, NEW_TOKENS)
            assert [answer.tokens for answer in answers] == expected
        assert max(answer.meta["spec_accept_length"] for answer in answers) > 1.5
        states = server.get("/server_info").json()["internal_states"]
        steps = [sum(state["sglang_dflash"]["steps_by_width"].values()) for state in states]
        assert len(steps) == 2 and all(steps), "a replica served nothing"
        assert_nothing_leaked(server)


def test_greedy_ranks_send_a_pair_per_row_and_others_all_logits(tmp_path: Path) -> None:
    """A token and its logit, for the drafter and for the target; with penalties the target's whole shard."""
    inputs, penalties = corpus("tiny-dense", 4, seed=4), {"temperature": 0, "frequency_penalty": 0.5}

    def ask(server: Server) -> list[list[int]]:
        answers = generate_all(server, inputs, 4, NEW_TOKENS)
        answers += generate_all(server, inputs, 4, NEW_TOKENS, sampling_params=penalties)
        return [answer.tokens for answer in answers]

    with plain_server("tiny-dense", tmp_path, "--tp-size", "2") as server:
        expected = ask(server)
    with dflash_server("tiny-dense", tmp_path, "--tp-size", "2", **with_plugin(tmp_path, "gathers")) as server:
        assert ask(server) == expected
    sent: dict[bool, list[float]] = {False: [], True: []}
    for line in map(json.loads, (tmp_path / "gathers.jsonl").read_text().splitlines()):
        sent[line["penalised"]].append(line["sent"] / line["rows"])
    assert max(sent[False]) <= 16 and min(sent[True]) >= VOCABULARY / 2 * 4


def test_a_rank_that_computes_something_else_drafts_and_commits_what_rank_0_does(tmp_path: Path) -> None:
    """Users of other workers measured ranks that drafted differently. Hidden states, logits and times are skewed."""
    repeated = load("edit-json", 4)
    inputs = [*corpus("tiny-hybrid", 8, seed=4), *message_ids("tiny-hybrid", repeated)]
    with plain_server("tiny-hybrid", tmp_path, "--tp-size", "2") as server:
        expected = [answer.tokens for answer in generate_all(server, inputs, 4, NEW_TOKENS)]
    flags = ("--tp-size", "2", "--speculative-adaptive")
    plugin = with_plugin(tmp_path, "skew")
    with dflash_server("tiny-hybrid", tmp_path, *flags, drafter="noisy", block=32, **plugin) as server:
        answers = generate_all(server, inputs, 4, NEW_TOKENS)
        assert [answer.tokens for answer in answers] == expected
        assert worker_info(server)["copied_blocks_by_match_length"]
        assert_nothing_leaked(server)
    ranks = [(tmp_path / f"rank-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    assert ranks[0] == ranks[1] and len(ranks[0]) > 10
    assert len({json.loads(line)["width"] for line in ranks[0]}) > 1


def test_ranks_that_learn_different_things_are_one_error(tmp_path: Path) -> None:
    """And not two ranks that wait for each other with blocks of different widths."""
    flags = ("--tp-size", "2", "--speculative-adaptive")
    inputs, skewed = corpus("tiny-hybrid", 4, seed=4), with_plugin(tmp_path, "skew_policy")
    with (
        pytest.raises((httpx.HTTPError, AssertionError)),
        dflash_server("tiny-hybrid", tmp_path, *flags, **skewed) as server,
    ):
        generate_all(server, inputs, 4, NEW_TOKENS)
    [log] = tmp_path.glob("server-*.log")
    assert log.read_text().count("DFlashError: sglang-dflash: tensor-parallel ranks") == 1
