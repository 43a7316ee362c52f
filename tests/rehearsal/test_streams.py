"""A real server on emulated streams has no race and does nothing that CUDA refuses."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.catalogue import processor
from tests.support.generation import Params, assert_nothing_leaked, generate
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, dflash_server, with_plugin

PAIR, NUMBER = "tiny-hybrid", 24
SCHEDULE = (
    *("--max-running-requests", "4", "--chunked-prefill-size", "256", "--enable-mixed-chunk"),
    *("--speculative-draft-window-size", "64"),
)
REQUESTS: tuple[tuple[Params, Params], ...] = (
    ({}, {}),
    ({"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"return_logprob": True, "top_logprobs_num": 2}),
    ({"temperature": 1.0, "sampling_seed": 7}, {}),
    ({"frequency_penalty": 0.5, "min_new_tokens": 10}, {}),
    ({"custom_params": {}}, {"custom_logit_processor": processor("BanAFifth")}),
    ({"regex": "[a-z A-Z]{30,60}"}, {}),
)


@pytest.mark.slow
def test_a_server_has_no_race(tmp_path: Path) -> None:
    prompts, plugin = corpus(PAIR, NUMBER, 5), with_plugin(tmp_path, "streams")
    plugin["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])

    def ask(i: int) -> int:
        # Kind after kind: while a grammar or a processor runs, the host waits, and most orders are settled.
        params, body = REQUESTS[i * len(REQUESTS) // NUMBER]
        return len(generate(server, prompts[i], 24 + i % 17, sampling_params=params, **body).tokens)

    with dflash_server(PAIR, tmp_path, *SCHEDULE, base=FEATURES, **plugin) as server, ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(NUMBER)))
        found = json.loads((tmp_path / "streams.json").read_text())
        assert_nothing_leaked(server)
    print(found["operators"], "operators,", found["steps"], "steps")
    assert found["operators"] > 10_000
    assert not found["races"] and not found["refused"]
