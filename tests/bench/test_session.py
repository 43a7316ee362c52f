"""The order of runs, resumption, and the servers of the arms."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import load, results, session
from sglang_dflash_lab.bench.arms import Arm, check_arm, find_pair, parse_arms
from sglang_dflash_lab.bench.load import Cell
from sglang_dflash_lab.bench.server import Launch
from sglang_dflash_lab.bench.session import Settings, plan
from tests.bench.test_figures import run as measured

PAIR = find_pair("tiny-hybrid", None, None)
INFO = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16, "internal_states": [{}]}
OURS = {**INFO, "internal_states": [{"sglang_dflash": {}}]}
PLAIN = {"internal_states": [{}]}


def settings(out: Path, modes: str = "ar,dflash:16", **more: Any) -> Settings:
    return Settings(PAIR, parse_arms(modes), ["math"], [1, 4], 2, 2, out, **more)


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Starts, ends and runs of servers that answer nothing."""
    found: list[str] = []

    @contextlib.contextmanager
    def running(launch: Launch, log: Path) -> Iterator[str]:
        label = "dflash:16" if "DFLASH" in launch.args else "ar"
        found.append(f"start {label}")
        yield f"http://{label}"
        found.append(f"stop {label}")

    def measure(url: str, cell: Cell, prompts: Path, *_: Any) -> dict[str, Any]:
        assert prompts.exists()
        found.append(f"{cell.mode} {cell.concurrency} {cell.repeat}")
        return measured(cell, 100.0, ["a", "b"])

    def get(url: str, **_: Any) -> httpx.Response:
        info = {"version": "0", **(OURS if "dflash" in url else PLAIN)}
        return httpx.Response(200, json=info, request=httpx.Request("GET", url))

    monkeypatch.setattr(session, "running", running)
    monkeypatch.setattr(load, "measure", measure)
    monkeypatch.setattr(load, "write_prompts", lambda path, *_: path.touch())
    monkeypatch.setattr(httpx, "get", get)
    return found


def test_arms_alternate_within_a_cell_and_their_order_is_reversed_in_every_repeat(tmp_path: Path) -> None:
    order = [(cell.mode, cell.concurrency, cell.repeat) for cell in plan(settings(tmp_path))]
    first = [("ar", 1, 0), ("dflash:16", 1, 0), ("ar", 4, 0), ("dflash:16", 4, 0)]
    assert order == [*first, ("dflash:16", 1, 1), ("ar", 1, 1), ("dflash:16", 4, 1), ("ar", 4, 1)]


def test_a_session_measures_only_what_is_missing(tmp_path: Path, events: list[str]) -> None:
    session.run(settings(tmp_path, "ar"), print)
    with (tmp_path / results.FILE_NAME).open("a") as file:
        file.write('{"kind": "run", "mode": "ar", "ta')  # a killed process
    events.clear()
    session.run(settings(tmp_path), print)
    assert events[:3] == ["start dflash:16", "dflash:16 1 0", "dflash:16 4 0"] and "start ar" not in events
    assert len(results.read(tmp_path, "run")) == 8
    events.clear()
    session.run(settings(tmp_path), print)
    assert events == []


@pytest.mark.parametrize(
    ("arm", "info", "found"),
    [("dflash:16", INFO, "not our worker"), ("builtin:16", OURS, "our worker"), ("dflash:8", OURS, "block size 16")]
    + [("ar", OURS, "speculative_algorithm DFLASH"), ("adaptive:16", PLAIN, "speculative_algorithm None")],
)
def test_a_server_that_is_not_its_arm_is_refused(arm: str, info: dict[str, Any], found: str) -> None:
    with pytest.raises(DFlashError, match=found):
        check_arm(Arm.parse(arm), info)
