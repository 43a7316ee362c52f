"""Changing traffic: one schedule for all arms, users who come and go with its phases, totals and means per phase."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.diagnose.client import Sampling
from sglang_dflash_lab.measure import width_traffic
from sglang_dflash_lab.measure.width_traffic import Phase, by_phase, draw, report, run, schedule
from tests.support.hurry import Hurry


def test_a_schedule_is_its_seeds_and_switches_fit_task_and_load() -> None:
    phases = schedule(12, 5.0, (1, 8, 32), seed=3)
    assert phases == schedule(12, 5.0, (1, 8, 32), seed=3) != schedule(12, 5.0, (1, 8, 32), seed=4)
    assert [phase.task == "wild" for phase in phases] == [False, True] * 6
    assert {phase.task for phase in phases} >= {"math", "code", "json", "chat"}
    for turn in (phases[::2], phases[1::2]):
        assert sorted(phase.users for phase in turn) == [1, 1, 8, 8, 32, 32]
    assert [(phase.start, phase.end) for phase in phases] == [(5.0 * i, 5.0 * i + 5) for i in range(12)]


def test_as_many_requests_are_in_flight_as_the_phase_says(monkeypatch: pytest.MonkeyPatch) -> None:
    phase = Phase("wild", 3, 20.0, 40.0)
    flying: list[str] = []
    seen: list[list[str]] = []

    class Client:
        async def events(self, input_ids: list[str], sampling: Sampling) -> AsyncIterator[tuple[float, bytes]]:
            flying.append(input_ids[0])
            for count in (1, 2):
                await asyncio.sleep(0.75)
                seen.append(list(flying))
                yield width_traffic.now(), json.dumps({"meta_info": {"completion_tokens": count}}).encode()
            flying.remove(input_ids[0])

    async def finish(client: Any, users: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*users)

    monkeypatch.setattr(width_traffic, "finish", finish)
    waiting = {"math": itertools.cycle([["math"]]), "wild": itertools.cycle([["wild"]])}
    with asyncio.Runner(loop_factory=Hurry) as runner:
        monkeypatch.setattr(width_traffic, "now", runner.get_loop().time)
        tokens = runner.run(run(Client(), phase, waiting, 8))
    assert seen and all(here == ["wild"] * 3 for here in seen[:-4])
    assert tokens.between(0, 20) / 20 * 0.75 == pytest.approx(3, rel=0.05)


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
