"""Changing traffic: one schedule for all arms, users who come and go with its phases, totals and means per phase."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from measure import width_traffic
from measure.width_traffic import run, schedule
from measure.width_traffic_report import Phase, by_phase, draw, report
from sglang_dflash.bench.client import Sampling


def test_a_schedule_is_its_seeds_and_switches_fit_task_and_load() -> None:
    phases = schedule(12, 5.0, (1, 8, 32), seed=3)
    assert phases == schedule(12, 5.0, (1, 8, 32), seed=3) != schedule(12, 5.0, (1, 8, 32), seed=4)
    assert [phase.task == "wild" for phase in phases] == [False, True] * 6
    assert {phase.task for phase in phases} >= {"math", "code", "json", "chat"}
    assert sorted(phase.users for phase in phases) == [1] * 4 + [8] * 4 + [32] * 4
    assert [(phase.start, phase.end) for phase in phases] == [(5.0 * i, 5.0 * i + 5) for i in range(12)]
    assert len({phase.users for phase in phases if phase.task == "wild"}) > 1


def test_as_many_requests_are_in_flight_as_the_phase_says(monkeypatch: pytest.MonkeyPatch) -> None:
    phases = [Phase("math", 1, 0.0, 0.2), Phase("wild", 3, 0.2, 0.4), Phase("math", 2, 0.4, 0.6)]
    flying: list[int] = []
    seen: set[tuple[str, int]] = set()

    class Client:
        async def events(self, input_ids: list[int], sampling: Sampling) -> AsyncIterator[tuple[float, bytes]]:
            flying.append(input_ids[0])
            seen.add(("math" if input_ids[0] == 1 else "wild", len(flying)))
            for count in (1, 2):
                await asyncio.sleep(0.005)
                yield width_traffic.now(), json.dumps({"meta_info": {"completion_tokens": count}}).encode()
            flying.remove(input_ids[0])

    async def finish(client: Any, users: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*users)

    monkeypatch.setattr(width_traffic, "finish", finish)
    tokens = asyncio.run(run(Client(), phases, {"math": [[1]], "wild": [[2]]}, 8))
    assert max(users for _, users in seen) == 3 and ("wild", 3) in seen and ("math", 3) not in seen
    first, second = tokens.between(0, 0.2), tokens.between(0.2, 0.4)
    assert 2 * first < second < 5 * first


PHASES = [Phase("math", 1, 0.0, 10.0), Phase("wild", 8, 10.0, 20.0)]


def row(arm: str, *speeds: float) -> dict[str, Any]:
    tokens = round(sum(speeds) * 5)
    return {"arm": arm, "tokens": tokens, "bin_s": 5.0, "speeds": speeds, "phases": [asdict(p) for p in PHASES]}


ROWS = [row("plain", 10, 10, 40, 60), row("8", 40, 40, 40, 40), row("adaptive", 30, 50, 40, 60)]


def test_a_phases_speed_is_the_mean_of_its_bins() -> None:
    assert by_phase(ROWS[0], PHASES) == [10, 50]


def test_the_report_compares_the_total_with_the_best_other_arm() -> None:
    text = "\n".join(report(ROWS))
    assert "| arm | tokens | math c=1 | wild c=8 |" in text
    assert "| plain | 600 | 10 | 50 |" in text
    assert "adaptive over the best other arm (8): 1.12x" in text


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(ROWS, tmp_path / "traffic.png")
    assert (tmp_path / "traffic.png").read_bytes().startswith(b"\x89PNG")
