"""The cost table: correction by measured steps, and predictions that never fall with width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import CostTable
from tests.width.traffic import WIDTHS, Machine

SIZES = (1, 8, 32)
POINTS = Machine(3).points(SIZES)

measurements = st.lists(st.tuples(st.integers(1, 80), st.sampled_from(WIDTHS), st.floats(1e-3, 1e5)), max_size=40)
calibrations = st.sets(st.sampled_from(SIZES), min_size=1).flatmap(
    lambda sizes: st.fixed_dictionaries({(size, width): st.floats(0.1, 1000) for size in sizes for width in WIDTHS})
)


def ms(table: CostTable, size: int, width: int) -> float:
    return table.row(size)[WIDTHS.index(width)]


@given(calibrations, measurements)
def test_times_never_fall_with_width(points, measured):
    table = CostTable(points)
    for step in measured:
        table.observe(*step)
    for size in (1, 2, 3, 8, 13, 32, 200):
        row = table.row(size)
        assert row == sorted(row) and row[0] > 0 and row[-1] < float("inf")


def test_between_two_batch_sizes_times_are_linear_and_beyond_them_constant():
    table = CostTable(POINTS)
    assert table.row(1) == pytest.approx([POINTS[1, width] for width in WIDTHS])
    assert ms(table, 20, 4) == pytest.approx((POINTS[8, 4] + POINTS[32, 4]) / 2)
    assert table.row(100) == table.row(32)


def test_unknown_widths_impossible_times_and_upper_bounds_above_the_prediction_are_ignored():
    table = CostTable(POINTS)
    before = table.row(8)
    for width, taken in ((3, 5.0), (4, 0.0), (4, -1.0), (4, float("inf")), (4, float("nan"))):
        table.observe(8, width, taken)
    table.observe(8, 4, 2 * POINTS[8, 4], at_most=True)
    assert table.row(8) == before and table.measured == 0
    for _ in range(20):
        table.observe(8, 4, 0.6 * POINTS[8, 4], at_most=True)
    assert ms(table, 8, 4) < 0.8 * POINTS[8, 4]
