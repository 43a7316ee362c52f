"""Turns of arms in one server: what is counted of them, and what the report makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash_lab.measure.width_turns import (
    FIXED,
    OWN_POLICY,
    Cell,
    interval,
    over_best,
    over_chosen,
    report,
    speeds,
    whole_turns,
)

CELL = Cell("p", "d", "own", 2)


def step(ms: float | None, accept: list[int]) -> dict[str, Any]:
    return {"ms": ms, "users": len(accept), "accept": accept}


def test_a_turn_counts_its_full_and_uninterrupted_steps_after_the_first_two() -> None:
    steps = [step(99, [9, 9])] * 2 + [step(10, [1, 2]), step(None, [9, 9]), step(20, [3, 3]), step(50, [9])]
    arms = ["4"] * len(steps)
    assert list(whole_turns([*steps, *steps], [*arms, *["own"] * len(steps)], CELL)) == [("4", 9, 30), ("own", 9, 30)]
    assert list(whole_turns(steps[:2], arms[:2], CELL)) == []


def test_speeds_are_sums_over_sums() -> None:
    assert speeds([("4", 10, 100), ("4", 30, 100), ("own", 8, 40)]) == {"4": 200, "own": 200}


def test_the_interval_holds_the_ratio_and_is_wider_with_more_noise() -> None:
    steady = [(arm, 10.0, 100.0 + arm.count("o")) for arm in ("4", "8", OWN_POLICY) for _ in range(20)]
    noisy = [(arm, tokens * (1 + n % 2), ms) for n, (arm, tokens, ms) in enumerate(steady)]
    low, high = interval(steady)
    assert low == pytest.approx(over_best(steady)) == pytest.approx(high)
    low, high = interval(noisy)
    assert low < over_best(noisy) < high


def test_the_best_arm_is_not_the_luckiest() -> None:
    """Arms alike, each lucky in other turns: the best of them all looks better than it is."""
    luck = {"4": (2.0, 1.0), "8": (1.0, 2.0), OWN_POLICY: (1.5, 1.5)}
    turns = [(arm, 10.0 * luck[arm][n % 2], 100.0) for arm in luck for n in range(20)]
    assert over_chosen(turns) == pytest.approx(1.5)
    even = [(arm, 10.0 + (arm == "8"), 100.0) for arm in luck for _ in range(20)]
    assert over_chosen(even) == pytest.approx(over_best(even)) == pytest.approx(10 / 11)


def test_the_report_names_what_is_surely_below() -> None:
    turns = [(arm, 10.0, 100.0) for arm in FIXED for _ in range(9)]
    rows = [{**vars(CELL), "turns": [*turns, *[(OWN_POLICY, 10.0, ms)] * 9]} for ms in (100.0, 125.0)]
    rows.append({**vars(CELL), "concurrency": 32, "turns": turns})
    text = "\n".join(report(rows))
    assert text.startswith("too short: p d own 32")
    assert "mean 0.900, 1 of 2 cells at 0.97" in text and "surely below it: p d own 2" in text
    assert "geometric mean: 0.89" in text
