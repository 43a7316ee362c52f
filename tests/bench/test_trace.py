"""Traces read from streams and from profiler files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from rich.console import Console

from sglang_dflash.bench import profile, trace
from sglang_dflash.bench.client import Sampling
from sglang_dflash.bench.modes import Mode, parse_modes
from sglang_dflash.bench.settings import Pair, Settings
from sglang_dflash.errors import DFlashError
from tests.bench.fake_server import FakeServer, serve

DFLASH = Mode.parse("dflash:16")


def stream(*events: tuple[float, int], verify_steps: int | None) -> list[tuple[float, bytes]]:
    meta = {"prompt_tokens": 5} | ({} if verify_steps is None else {"spec_verify_ct": verify_steps})
    return [(at, json.dumps({"meta_info": {**meta, "completion_tokens": n}}).encode()) for at, n in events]


def read(events: list[tuple[float, bytes]], mode: Mode = DFLASH) -> trace.Trace:
    return trace.read_events(events, mode, "math", "0", 1)


def test_differences_of_a_stream_are_accept_lengths_and_step_times():
    found = read(stream((1.0, 1), (1.5, 9), (2.5, 12), verify_steps=2))
    assert (found.committed, found.step_s, found.width) == ([8, 3], [0.5, 1.0], 16)
    assert found.whole


def test_a_step_without_an_event_of_its_own_is_noticed():
    assert not read(stream((1.0, 1), (2.5, 12), verify_steps=2)).whole


def test_plain_decoding_is_a_step_per_token():
    found = read(stream((1.0, 1), (1.1, 2), (1.2, 3), verify_steps=None), Mode.parse("ar"))
    assert found.whole
    assert found.width == 1
    assert not read(stream((1.0, 1), (1.2, 3), verify_steps=None), Mode.parse("ar")).whole


def test_costs_are_medians_over_whole_traces():
    whole = read(stream((0.0, 1), (1.0, 5), (3.0, 11), (4.0, 16), verify_steps=3))
    partial = read(stream((0.0, 1), (50.0, 9), verify_steps=2))
    (cost,) = trace.step_costs([whole, partial])
    assert (cost.steps, cost.median_s, cost.committed) == (3, 1.0, 5.0)
    assert "1 of 2 traces" in trace.cost_table([whole, partial]).caption


def test_traces_of_a_server_are_written_with_their_provenance(tmp_path: Path):
    with serve(FakeServer(block=16)) as fake:
        settings = Settings(
            pair=Pair("target", "drafter"),
            modes=tuple(parse_modes("dflash:16")),
            tasks=("json",),
            concurrencies=(1, 2),
            num_prompts=2,
            repeats=1,
            out=tmp_path,
            sampling=Sampling(64),
            base_urls={"dflash:16": fake.url},
        )
        traces = trace.record(settings, Console(quiet=True))
    assert [len(t.committed) for t in traces] == [2] * 4
    header, *rows = [json.loads(line) for line in (tmp_path / trace.TRACES).read_text().splitlines()]
    assert header["kind"] == "provenance" and header["settings"]["num_prompts"] == 2
    assert [row["kind"] for row in rows] == ["trace"] * 4
    assert (tmp_path / trace.COSTS).read_text().startswith("mode,width,concurrency")


def profiler_file(path: Path, *events: dict[str, object]) -> Path:
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": list(events)}, file)
    return path


def test_named_stages_of_a_profile(tmp_path: Path):
    event = {"name": "dflash.verify", "cat": "user_annotation"}
    path = profiler_file(
        tmp_path / "t.json.gz",
        {**event, "dur": 2000},
        {**event, "dur": 4000},
        {**event, "cat": "gpu_user_annotation", "dur": 9000},
        {"name": "aten::mm", "cat": "cpu_op", "dur": 1},
    )
    assert profile.stage_table(path).rows == [["verify", "2", "6.00", "3.000"]]


def test_a_profile_without_our_stages_says_what_to_do(tmp_path: Path):
    with pytest.raises(DFlashError, match="profile a dflash mode"):
        profile.stage_table(profiler_file(tmp_path / "t.json.gz"))
