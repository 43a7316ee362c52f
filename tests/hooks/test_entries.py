"""Ways into a server: whichever process answers, a request's drafts are those that were verified."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.pairs import drafter_path, target_path
from tests.support.generation import generate_all
from tests.support.pair_servers import RANDOM_WIDTHS, dflash_server
from tests.support.prompts import corpus
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
ROOT = Path(__file__).parents[2]


def assert_counts_verified_drafts(metas: list[dict[str, Any]]) -> None:
    for meta in metas:
        steps, drafts = meta["spec_verify_ct"], meta["spec_num_proposed_drafts"]
        assert drafts == round((meta["spec_cap_length"] - 1) * steps) < 15 * steps
        assert meta["spec_accept_rate"] == pytest.approx(meta["spec_num_correct_drafts"] / drafts)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    workers = ("--tokenizer-worker-num", "2", "--detokenizer-worker-num", "2")
    base = ("--dtype", "float32", "--max-running-requests", "8")
    with dflash_server(PAIR, tmp_path_factory.mktemp("entries"), *RANDOM_WIDTHS, *workers, base=base) as server:
        yield server


def test_tokenizer_workers_count_verified_drafts(server: Server) -> None:
    """Each answers some of the requests."""
    answers = generate_all(server, corpus(PAIR, 8), 8, 32)
    assert_counts_verified_drafts([answer.meta for answer in answers])
    assert all(server.get("/server_info").json()["speculative_adaptive"] for _ in range(4))


@pytest.mark.slow
@pytest.mark.parametrize("hand_built", [False, True], ids=["keywords", "ServerArgs"])
def test_an_engine_in_python_counts_verified_drafts(hand_built: bool) -> None:
    keywords = {
        "model_path": str(target_path(PAIR)),
        "speculative_draft_model_path": str(drafter_path(PAIR)),
        "speculative_algorithm": "DFLASH",
        "speculative_num_draft_tokens": 16,
        "speculative_adaptive": True,
        "speculative_adaptive_config": RANDOM_WIDTHS[-1],
        "dtype": "float32",
        "skip_tokenizer_init": True,
    }
    sampling = {"temperature": 0, "max_new_tokens": 32}
    requests = [{"input_ids": prompt, "sampling_params": sampling} for prompt in corpus(PAIR, 4)]
    ended = subprocess.run(
        [sys.executable, str(ROOT / "tests/support/run_engine.py")],
        input=json.dumps({"keywords": keywords, "requests": requests, "hand_built": hand_built}),
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    assert_counts_verified_drafts([answer["meta_info"] for answer in found["answers"]])
    assert found["state"]["sglang_dflash"]["adaptive"] and found["info"]["speculative_adaptive"]
