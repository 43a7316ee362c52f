"""The emulated streams report what no event orders, and nothing else; and so does a real server on them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.rehearsal.streams import Event, Stream, StreamContext
from tests.rehearsal.streams_watch import Calls, Operators, Watch
from tests.support.generation import Params, assert_nothing_leaked, generate
from tests.support.pair_servers import FEATURES, dflash_server, with_plugin
from tests.support.prompts import corpus
from tests.support.servers import Server

DEVICE = torch.device("cpu").type  # not by the word, which would mean the host
ONE, OTHER = Stream(name="one"), Stream(name="other")


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    watch = Watch()
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: watch.keep(tensor, stream))
    with torch.inference_mode(), Operators(watch), Calls(watch):
        yield watch


def made(stream: Stream = ONE) -> tuple[Tensor, Event]:
    """A result of ``stream``, and the event behind it."""
    done = Event()
    with StreamContext(stream):
        result = torch.zeros(4, device=DEVICE) + 1
        done.record()
    return result, done


def read_by_another_stream(*, waits: bool) -> None:
    result, done = made()
    with StreamContext(OTHER):
        if waits:
            done.wait()
        result.record_stream(OTHER)
        result * 2


def overwritten_under_a_read(*, waits: bool) -> None:
    result, done = made()
    OTHER.wait_event(done)
    with StreamContext(OTHER):
        result.record_stream(OTHER)
        result * 2
    if waits:
        ONE.wait_stream(OTHER)
    with StreamContext(ONE):
        result.zero_()


def event_recorded_too_early(*, waits: bool) -> None:
    result, done = made()
    with StreamContext(ONE):
        result.add_(1)
        if waits:
            done.record()
    with StreamContext(OTHER):
        done.wait()
        result.record_stream(OTHER)
        result * 2


def host_copy_read(*, waits: bool) -> None:
    result, done = made()
    with StreamContext(ONE):
        host = result.to("cpu", non_blocking=True)
        done.record()
    if waits:
        done.synchronize()
    host.tolist()


def host_buffer_reused(*, waits: bool) -> None:
    result, done = made()
    buffer = torch.zeros(4)
    with StreamContext(ONE):
        buffer.copy_(result, non_blocking=True)
        done.record()
        done.synchronize()
        if waits:
            buffer.tolist()
        buffer.copy_(result, non_blocking=True)
    if not waits:
        buffer.tolist()


def host_memory_changed_under_its_copy(*, waits: bool) -> None:
    host = torch.tensor([1, 2])
    with StreamContext(ONE):
        host.to(DEVICE, non_blocking=True)
    if waits:
        ONE.synchronize()
    host[0] = 3


def freed_under_a_read(*, waits: bool) -> None:
    result, done = made()
    with StreamContext(OTHER):
        done.wait()
        result[1:] * 2
        if waits:
            result.record_stream(OTHER)
    del result
    made()


PROGRAMS = (
    read_by_another_stream,
    overwritten_under_a_read,
    event_recorded_too_early,
    host_copy_read,
    host_buffer_reused,
    host_memory_changed_under_its_copy,
    freed_under_a_read,
)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_race_is_reported_and_its_cure_is_not(program: Callable[..., None], watch: Watch) -> None:
    program(waits=True)
    assert not watch.races
    program(waits=False)
    assert watch.races


def test_the_host_waits_for_a_value_and_for_a_copy_that_is_not_asynchronous(watch: Watch) -> None:
    result, _ = made()
    for wait in (result.tolist, result[0].item, result.nonzero, result.cpu, lambda: torch.tensor([1]).to(DEVICE)):
        watch.waits.clear()
        with StreamContext(ONE):
            wait()
        assert watch.waits, wait
    watch.waits.clear()
    with StreamContext(ONE):
        torch.tensor([1]).to(DEVICE, non_blocking=True), result.to("cpu", non_blocking=True), result.view(2, 2)[0]
    torch.tensor([1, 2]).tolist()
    assert not watch.waits


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
# Faults that ``dflash_test_plugin.overlap`` plants, and what the report of each must name.
FAULTS = {
    "host copy without its event": "overlap.py <listcomp> [host]",
    "one host buffer": "overlap.py start_copy",
    "no record_stream": "overlap.py async_d2h",
    "one result buffer": "overlap.py accept",
    "result on the scheduler's stream": "overlap.py prepare_for_decode",
    "shared table after its event": "overlap.py inject",
    "no wait for the lengths": "overlap_utils.py resolve_seq_lens_cpu",
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
    assert found["races"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_race_is_reported(fault: str, server: tuple[Server, Path]) -> None:
    races = serve(*server, fault, 12)["races"]
    assert any(FAULTS[fault] in race for race in races), races
