"""A real server on emulated streams has no race and does nothing that CUDA refuses; every planted fault is reported."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.plugin.dflash_test_plugin.faults import FAULTS
from tests.support.generation import Params, assert_nothing_leaked, generate
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server, with_plugin

REFUSED = "refused"  # of ``dflash_test_plugin.overlap``

# --- a real server, whose scheduler, forward and copy streams are emulated

PAIR = "tiny-hybrid"
SCHEDULE = (
    *("--max-running-requests", "4", "--chunked-prefill-size", "256", "--enable-mixed-chunk"),
    *("--speculative-draft-window-size", "64"),
)
PROCESSOR = json.dumps({"callable": b"cdflash_test_plugin.custom_processor\nBanAFifth\n.".hex()})
REQUESTS: tuple[tuple[Params, Params], ...] = (
    ({}, {}),
    ({"temperature": 1.0, "top_k": 20, "top_p": 0.9}, {"return_logprob": True, "top_logprobs_num": 2}),
    ({"temperature": 1.0, "sampling_seed": 7}, {}),
    ({"frequency_penalty": 0.5, "min_new_tokens": 10}, {}),
    ({"custom_params": {}}, {"custom_logit_processor": PROCESSOR}),
    ({"regex": "[a-z A-Z]{30,60}"}, {}),
)
# Races that ``dflash_test_plugin.overlap`` plants, and what the report of each must name.
RACES = {
    "no record_stream": " async_d2h ",
    "shared table after its event": " plant ",
    "no wait for the lengths": " resolve_seq_lens_cpu ",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("streams")
    plugin = with_plugin(folder, "streams")
    plugin["PYTHONPATH"] += os.pathsep + str(Path(__file__).parents[2])
    with dflash_server(PAIR, folder, *SCHEDULE, base=FEATURES, **plugin) as server:
        yield server, folder
        assert_nothing_leaked(server)


def serve(server: Server, folder: Path, fault: str, number: int) -> dict[str, Any]:
    """What is found while ``number`` requests are served with ``fault`` planted."""
    (folder / "plant").write_text(fault)
    prompts = corpus(PAIR, number, 5)

    def ask(i: int) -> int:
        # Kind after kind: while a grammar or a processor runs, the host waits, and most orders are settled.
        params, body = REQUESTS[i * len(REQUESTS) // number]
        return len(generate(server, prompts[i], 24 + i % 17, sampling_params=params, **body).tokens)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(number)))
    found: dict[str, Any] = json.loads((folder / "streams.json").read_text())[fault]
    return found


@pytest.mark.slow
def test_a_server_has_no_race(server: tuple[Server, Path]) -> None:
    found = serve(*server, "", 24)
    print(found["operators"], "operators,", found["steps"], "steps")
    assert found["operators"] > 10_000
    assert not found["races"] and not found["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("fault", RACES)
def test_a_planted_race_is_reported(fault: str, server: tuple[Server, Path]) -> None:
    races = serve(*server, fault, 12)["races"]
    assert any(RACES[fault] in race for race in races), races


@pytest.mark.slow
def test_every_fault_that_cuda_refuses_is_reported(server: tuple[Server, Path]) -> None:
    found = serve(*server, REFUSED, 8)
    reports = [*found["races"], *found["refused"]]
    for name, (kind, fault) in FAULTS.items():
        place = f"dflash_test_plugin/faults.py:{fault.__code__.co_firstlineno} "
        assert any(report.startswith(kind) and place in report for report in reports), (name, reports)
