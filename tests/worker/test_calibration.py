"""Costs at the start: within their share of it, equal on all ranks, and good enough to choose widths."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.worker.start import calibration
from tests.width.traffic import WIDTHS, Machine, drive

pytestmark = pytest.mark.sglang

USERS = 32
SIZES = (1, 4, 16, USERS)


class SlowMachine(Machine):
    """A model of 135M parameters on two CPU cores, where products are padded to 16 rows: the times of a trial."""

    def milliseconds(self, batch_size: int, width: int) -> float:
        rows = batch_size * width
        return 81.6 if rows == 1 else (10.6 + 8.77 * max(16, rows)) * (1 + rows / 2000)


class Rank:
    """A rank with its own clock; rank 0's decisions reach the others.

    Attributes:
        steps: that it ran, in order.
        seconds: that they took by its clock.
    """

    def __init__(self, patch: pytest.MonkeyPatch, start: float, slower: float = 1.0, first: Rank | None = None) -> None:
        self._slower, self._patch, self._start = slower, patch, start
        self.steps, self.seconds = list[tuple[int, int]](), 0.0
        self.decisions = list[bool]()
        self._received: Iterator[bool] | None = None if first is None else iter(first.decisions)

    def _step(self, batch_size: int, width: int) -> None:
        self.steps.append((batch_size, width))
        cold = 2 if self.steps.count((batch_size, width)) == 1 else 1
        self.seconds += cold * self._slower * MACHINE.milliseconds(batch_size, width) / 1000

    def _decide(self, mine: bool) -> bool:
        self.decisions.append(mine if self._received is None else next(self._received))
        return self.decisions[-1]

    def times(self) -> dict[tuple[int, int], float]:
        group = SimpleNamespace(broadcast_object=self._decide)
        for name, replacement in (
            ("get_parallel", lambda: SimpleNamespace(tp_group=group)),
            ("time", SimpleNamespace(perf_counter=lambda: self.seconds)),
            ("since_start", lambda: self._start),
        ):
            self._patch.setattr(calibration, name, replacement)
        target: Any = SimpleNamespace(device="cpu", max_running_requests=USERS)
        return calibration.step_times(target, WIDTHS, self._step)


MACHINE = SlowMachine(16)


@pytest.mark.parametrize("start", [40, 80, 200])
def test_calibration_takes_a_tenth_of_a_start_and_runs_the_same_steps_on_all_ranks(
    start: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Rank(monkeypatch, start)
    first.times()
    *_, last = first.steps
    assert first.seconds - 2 * MACHINE.milliseconds(*last) / 1000 <= 0.1 * (start + first.seconds)
    second = Rank(monkeypatch, start, slower=3, first=first)
    second.times()
    assert second.steps == first.steps and len(first.steps) < 5 * len(SIZES) * len(WIDTHS)


@pytest.mark.parametrize("start", [5, 200])
@pytest.mark.parametrize("users", [1, 8, USERS])
@pytest.mark.parametrize("hazard", [0.3, 0.6, 0.9, 0.97])
def test_extrapolated_costs_choose_widths_as_measured_ones_do(
    start: float, users: int, hazard: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = Rank(monkeypatch, start).times()
    assert times != pytest.approx(MACHINE.points(SIZES)) and set(times) == set(MACHINE.points(SIZES))

    def rate(points: dict[tuple[int, int], float]) -> float:
        return drive(AdaptiveWidth(CostTable(points)), MACHINE, lambda _: hazard, 300, users).rate()

    assert rate(times) >= 0.98 * rate(MACHINE.points(SIZES))
