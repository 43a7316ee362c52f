"""The cost table: calibration, correction by measured steps, and monotony whatever was measured."""

from __future__ import annotations

from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import CostTable
from sglang_dflash.width.cost import isotonic
from tests.width.traffic import WIDTHS, Machine

SIZES = (1, 8, 32)
POINTS = Machine(3).points(SIZES)

measurements = st.lists(
    st.tuples(st.integers(1, 80), st.sampled_from(WIDTHS), st.integers(0, 50_000), st.floats(1e-3, 1e5)), max_size=40
)
calibrations = st.sets(st.sampled_from(SIZES)).flatmap(
    lambda sizes: st.fixed_dictionaries({(size, width): st.floats(0.1, 1000) for size in sizes for width in WIDTHS})
)


def ms(table: CostTable, size: int, width: int, context: int = 0) -> float:
    return table.row(size, context)[WIDTHS.index(width)]


@given(calibrations, measurements)
def test_times_never_fall_with_batch_size_or_width_whatever_was_measured(points, measured):
    table = CostTable(WIDTHS, points)
    for step in measured:
        table.observe(*step)
    rows = [table.row(size, 100) for size in (1, 2, 3, 5, 8, 13, 32, 50, 64, 100, 200)]
    for row in rows:
        assert all(0 < ms < float("inf") for ms in row)
        assert all(left <= right * (1 + 1e-9) for left, right in zip(row, row[1:], strict=False))
    for smaller, larger in zip(rows, rows[1:], strict=False):
        assert all(left <= right * (1 + 1e-9) for left, right in zip(smaller, larger, strict=True))


@pytest.mark.parametrize("points", [POINTS, {}], ids=["calibrated", "not calibrated"])
def test_an_outlier_moves_a_settled_table_by_a_few_percent(points):
    table = CostTable(WIDTHS, points)
    for _ in range(100):
        table.observe(8, 4, 0, POINTS[8, 4])
    before = table.row(8)
    for ten_times in (10.0, 0.1):
        table.observe(8, 4, 0, POINTS[8, 4] * ten_times)
        assert table.row(8) == pytest.approx(before, rel=0.12)


def test_a_slower_machine_is_followed_within_50_steps_in_unvisited_cells_too():
    table, random = CostTable.calibrated(POINTS), Random(0)
    for slower, steps in ((1, 200), (2, 50)):
        for _ in range(steps):
            table.observe(8, 4, 0, slower * POINTS[8, 4] * random.lognormvariate(0, 0.05))
    assert ms(table, 8, 4) == pytest.approx(2 * POINTS[8, 4], rel=0.1)
    for cell in ((1, 1), (32, 16)):
        assert ms(table, *cell) == pytest.approx(2 * POINTS[cell], rel=0.2)


def test_without_calibration_steps_give_the_scale_and_the_shape():
    table = CostTable(WIDTHS)
    for width in WIDTHS * 4:
        table.observe(8, width, 0, POINTS[8, width])
    assert table.row(8) == pytest.approx([POINTS[8, width] for width in WIDTHS], rel=0.1)


def test_the_context_is_told_apart_from_a_slower_machine():
    table, random = CostTable.calibrated(POINTS), Random(0)
    for _ in range(600):
        width, context = random.choice(WIDTHS), random.randint(0, 20_000)
        table.observe(8, width, context, POINTS[8, width] + 0.001 * context)
    assert table.per_token == pytest.approx(0.001, rel=0.15)
    assert ms(table, 8, 1) == pytest.approx(POINTS[8, 1], rel=0.1)
    assert ms(table, 8, 1, 10_000) == pytest.approx(POINTS[8, 1] + 10, rel=0.1)


def test_unknown_widths_impossible_times_and_upper_bounds_that_say_nothing_are_ignored():
    table = CostTable.calibrated(POINTS)
    before = table.row(8)
    for width, taken in ((3, 5.0), (4, 0.0), (4, -1.0), (4, float("inf")), (4, float("nan"))):
        table.observe(8, width, 0, taken)
    table.observe(8, 4, 0, 2 * POINTS[8, 4], at_most=True)
    assert table.row(8) == before and table.measured == 0
    for _ in range(20):
        table.observe(8, 4, 0, 0.6 * POINTS[8, 4], at_most=True)
    assert ms(table, 8, 4) < 0.8 * POINTS[8, 4]


pairs = st.lists(st.tuples(st.floats(0.1, 1000), st.floats(0.01, 100)), min_size=1, max_size=12)


@given(pairs)
def test_the_result_never_falls_keeps_the_weighted_mean_and_leaves_monotone_input_alone(pairs):
    values, variances = [value for value, _ in pairs], [variance for _, variance in pairs]
    found = isotonic(values, variances)
    assert all(left <= right + 1e-9 for left, right in zip(found, found[1:], strict=False))
    weights = [1 / variance for variance in variances]
    assert fmean(found, weights) == pytest.approx(fmean(values, weights))
    assert isotonic(sorted(values), variances) == sorted(values)
