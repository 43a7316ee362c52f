"""More than one rank, and a server that ends at its start; replicas and SGLang's router: the soak's row ``replicas``.

A launch that cannot work ends before it loads weights, with one error that names the fault and a fix (all errors,
without a process: tests/cpu, tests/launch, tests/states).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash_lab.bench.tasks import load
from tests.support.broken_pairs import BROKEN, write_pair
from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.preloaded import run
from tests.support.prompts import corpus, message_ids
from tests.support.servers import Server, dflash_server, plain_server, with_plugin, worker_info

NEW_TOKENS = 48

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_a_rank_that_computes_something_else_drafts_and_commits_what_rank_0_does(tmp_path: Path) -> None:
    """Users of other workers measured ranks that drafted differently. Hidden states, logits and times are skewed."""
    repeated = load("edit-json", 4)
    inputs = [*corpus("tiny-hybrid", 8, seed=4), *message_ids("tiny-hybrid", repeated)]

    def ask(server: Server) -> list[list[int]]:
        answers = generate_all(server, inputs, 4, NEW_TOKENS)
        answers += generate_all(server, inputs[:4], 4, NEW_TOKENS, sampling_params={"frequency_penalty": 0.5})
        return [answer.tokens for answer in answers]

    with plain_server("tiny-hybrid", tmp_path, "--tp-size", "2", "--disable-overlap-schedule") as server:
        expected = ask(server)
    flags = ("--tp-size", "2", "--speculative-adaptive")
    plugin = with_plugin(tmp_path, "skew")
    with dflash_server("tiny-hybrid", tmp_path, *flags, drafter="noisy", block=32, **plugin) as server:
        assert ask(server) == expected
        assert worker_info(server)["copied_blocks_by_match_length"]
        assert_nothing_leaked(server)
    ranks = [(tmp_path / f"rank-{rank}.jsonl").read_text().splitlines() for rank in range(2)]
    assert ranks[0] == ranks[1] and len(ranks[0]) > 10
    assert len({json.loads(line)["width"] for line in ranks[0]}) > 1


def test_a_process_with_a_broken_pair_ends_with_one_error_before_it_loads_weights(tmp_path: Path) -> None:
    (broken,) = (pair for pair in BROKEN if pair.name == 'drafter mask_token_id "<|MASK|>"')
    write_pair(tmp_path, broken)
    pair = ("--model-path", str(tmp_path / "target"), "--speculative-draft-model-path", str(tmp_path / "drafter"))
    ended = run("-m", "sglang.launch_server", *pair, "--speculative-algorithm", "DFLASH", timeout=120)
    printed = ended.stdout + ended.stderr
    assert ended.returncode
    (error,) = {line.partition("sglang-dflash:")[2] for line in printed.splitlines() if "sglang-dflash:" in line}
    for words in (broken.names, "Fix:"):
        assert words in error
    assert "Load weight" not in printed
