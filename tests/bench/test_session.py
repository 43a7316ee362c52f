"""The order of the runs, what a session sends, and what survives an interruption."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from sglang_dflash.diagnose.answers import closed_loop
from sglang_dflash.diagnose.client import Sampling
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench import session as plan
from sglang_dflash_lab.bench.known_pairs import Pair
from sglang_dflash_lab.bench.modes import parse_modes
from sglang_dflash_lab.bench.results import RunKey
from sglang_dflash_lab.bench.session import Session
from sglang_dflash_lab.bench.settings import Settings
from tests.bench.fake_server import FakeServer, serve
from tests.bench.records import request, run

HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@contextlib.contextmanager
def two_arms(out: Path, **changes: object) -> Iterator[tuple[Settings, FakeServer, FakeServer]]:
    with serve(FakeServer()) as plain, serve(FakeServer(block=16)) as dflash:
        settings = Settings(
            pair=Pair("target", "drafter"),
            modes=tuple(parse_modes("ar,dflash:16")),
            tasks=("json",),
            concurrencies=(1, 2),
            num_prompts=3,
            repeats=2,
            out=out,
            sampling=Sampling(64, thinking=False),
            base_urls={"ar": plain.url, "dflash:16": dflash.url},
        )
        yield replace(settings, **changes), plain, dflash


def run_session(settings: Settings) -> None:
    Session(settings, Console(quiet=True)).run()


def test_arms_alternate_and_turn_around():
    order = [(k.repeat, k.concurrency, k.mode) for k in plan.interleaved(["a", "b"], ["t"], [1, 8], 2)]
    assert order == [
        (0, 1, "a"), (0, 1, "b"), (0, 8, "a"), (0, 8, "b"),
        (1, 1, "b"), (1, 1, "a"), (1, 8, "b"), (1, 8, "a"),
    ]  # fmt: skip


def test_one_server_at_a_time_changes_servers_as_seldom_as_it_can():
    order = [k.mode for k in plan.one_server_at_a_time(["a", "b", "c"], ["t"], [1], 3)]
    assert order == list("abccbaabc")


def test_a_whole_session(tmp_path: Path):
    with two_arms(tmp_path) as (settings, plain, dflash):
        run_session(settings)
        measured = results.read(tmp_path)
        assert [k.run for k in measured.runs] == list(plan.interleaved(["ar", "dflash:16"], ["json"], [1, 2], 2))
        assert len(measured.requests) == 3 * len(measured.runs)
        assert sorted(plain.generations()) == sorted(dflash.generations())
        assert {r.prompt_sha256 for r in measured.requests if r.run.mode == "ar"} == {
            r.prompt_sha256 for r in measured.requests if r.run.mode == "dflash:16"
        }
        # Prompts are tokenised once and by one server
        assert len([p for p, _ in plain.calls if p == "/v1/tokenize"]) == 3
        assert [p for p, _ in dflash.calls if p == "/v1/tokenize"] == []
        # Each run is warmed up at its concurrency, then flushed.
        warm = [path for path, _ in plain.calls][: [path for path, _ in plain.calls].index("/flush_cache")]
        assert warm.count("/generate") == 1
        # Measured requests are found in a server's log by the ids that it gave them
        assert len({r.rid for r in measured.requests} - {""}) == len(measured.requests)
    speculated = [r for r in measured.requests if r.run.mode == "dflash:16"]
    assert {(r.verify_steps, r.completion_tokens) for r in speculated} == {(1, 3)}
    assert {r.correct for r in measured.requests} == {False}
    assert {tuple((r.worker or {}).get("steps_by_width", {}).items()) for r in measured.runs if r.worker} == {
        (("16", 3),)
    }
    assert measured.provenance[0]["settings"]["seed"] == 0
    assert {row["mode"] for row in measured.servers} == {"ar", "dflash:16"}


def test_a_closed_loop_keeps_as_many_requests_in_flight_as_it_has_users():
    in_flight: list[int] = []
    at_once: list[int] = []
    answered: list[int] = []

    async def ask(item: int) -> None:
        in_flight.append(item)
        at_once.append(len(in_flight))
        await asyncio.sleep(0.001 * (1 + item % 3))
        in_flight.remove(item)
        answered.append(item)

    asyncio.run(closed_loop(range(20), 3, ask))
    assert sorted(answered) == list(range(20))
    assert at_once == [1, 2] + [3] * 18


def test_follow_ups_are_the_same_in_all_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The arms answer the first turn differently, yet are asked the same second turn: the first arm's answer counts."""
    from sglang_dflash_lab.bench.tasks.question import Question

    asked = Question("0", ({"role": "user", "content": "first"},), follow_ups=("second",))
    monkeypatch.setattr("sglang_dflash_lab.bench.tasks.load", lambda *_, **__: [asked])
    with two_arms(tmp_path, repeats=1, concurrencies=(1,)) as (settings, plain, dflash):
        dflash.answer = lambda prompt: [99]
        run_session(settings)
        assert plain.generations() == dflash.generations()
        assert len(plain.generations()) == 2
        (tokenised,) = [b for p, b in plain.calls if p == "/v1/tokenize" and len(b["messages"]) == 3]
        assert tokenised["messages"][1]["content"].endswith(" 7 8")


@pytest.fixture
def foreground() -> Iterator[None]:
    """SIGINT as a terminal's program has it: a background job, such as a CI runner's, inherits it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_keeps_finished_runs_and_a_second_session_makes_the_rest(tmp_path: Path, foreground: None):
    with two_arms(tmp_path) as (settings, plain, _):
        seen = iter(range(10**6))
        plain.on_generate = lambda: os.kill(os.getpid(), signal.SIGINT) if next(seen) == 9 else None
        with pytest.raises(KeyboardInterrupt):
            run_session(settings)
        kept = results.read(tmp_path)
        assert 0 < len(kept.runs) < 8
        assert len(kept.requests) == 3 * len(kept.runs)

        plain.calls.clear()
        run_session(settings)
        everything = results.read(tmp_path)
        assert len(everything.runs) == len(everything.finished) == 8
        assert len(everything.requests) == 3 * 8
        assert [run.session for run in everything.runs] == [0] * len(kept.runs) + [1] * (8 - len(kept.runs))
        assert [p for p, _ in plain.calls if p == "/v1/tokenize"] == []

        plain.calls.clear()
        run_session(settings)
        assert plain.calls == []


def test_resuming_with_other_settings_is_refused(tmp_path: Path):
    with two_arms(tmp_path, repeats=1) as (settings, _, __):
        run_session(settings)
        with pytest.raises(DFlashError, match="num_prompts 3, not 4"):
            run_session(replace(settings, num_prompts=4))
        run_session(replace(settings, repeats=2))  # more repeats belong to the same comparison


@pytest.mark.parametrize(
    ("fake", "found"),
    [
        (FakeServer(block=16, ours=False), "not our worker"),
        (FakeServer(block=8), "block size 8"),
        (FakeServer(), "speculative_algorithm None"),
    ],
)
def test_a_server_that_is_not_its_arm_is_refused(tmp_path: Path, fake: FakeServer, found: str):
    with serve(fake), two_arms(tmp_path) as (settings, plain, _):
        urls = {"ar": plain.url, "dflash:16": fake.url}
        with pytest.raises(DFlashError, match=found):
            run_session(replace(settings, base_urls=urls))


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"reply": lambda path, body: (500, [{"error": "out of slots"}])}, "answered 500.*out of slots"),
        ({"finish": "abort"}, "aborted"),
    ],
)
def test_a_failing_server_ends_the_session_with_its_words(broken: dict[str, Any], said: str, tmp_path: Path):
    with two_arms(tmp_path) as (settings, plain, _):
        vars(plain).update(broken)
        with pytest.raises(DFlashError, match=said):
            run_session(settings)


def test_of_an_interrupted_run_nothing_counts(tmp_path: Path):
    results.append_run(tmp_path, run("ar"), [request()])
    results.append(tmp_path, "request", [asdict(request(repeat=1))])
    path = tmp_path / results.FILE_NAME
    path.write_text(path.read_text() + '{"kind": "request", "ru')  # a line cut short by a kill
    read = results.read(tmp_path)
    assert (read.finished, len(read.runs), len(read.requests)) == ({RunKey("ar", "math", 1, 0)}, 1, 1)
    results.append_run(tmp_path, run("ar", repeat=1), [request(repeat=1)])
    assert len(results.read(tmp_path).runs) == 2
    path.write_text('{"kind": "prov\n{"kind": "provenance"}\n')
    with pytest.raises(DFlashError, match="line 1 of"):
        results.read(tmp_path)


def test_a_terminated_benchmark_stops_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """SIGTERM unwinds like Ctrl-C; the server would otherwise live on in its own session."""
    from sglang_dflash_lab.bench import server

    monkeypatch.setattr(server.Launch, "command", lambda _, port: [sys.executable, "-c", HEALTHY, str(port)])
    urls = []

    async def measure() -> None:
        async with server.running(server.Launch(()), tmp_path / "server.log", timeout_s=30) as url:
            urls.append(url)
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(30)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(measure())
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0], trust_env=False)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
