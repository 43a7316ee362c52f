"""Step times: calibration, correction by measured steps, and what no measurement can break."""

from __future__ import annotations

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import CostTable
from tests.width.traffic import WIDTHS, Machine

SIZES = (1, 8, 32)
POINTS = Machine(3).points(SIZES)

measurements = st.lists(
    st.tuples(st.integers(1, 80), st.sampled_from(WIDTHS), st.integers(0, 50_000), st.floats(1e-3, 1e5)), max_size=40
)
calibrations = st.dictionaries(
    st.tuples(st.sampled_from((1, 2, 8, 32)), st.sampled_from(WIDTHS)), st.floats(0.1, 1000), max_size=10
)


@given(calibrations, measurements)
def test_times_never_fall_with_batch_size_or_width_whatever_was_measured(points, measured):
    table = CostTable(WIDTHS, points)
    for step in measured:
        table.observe(*step)
    sizes = (1, 2, 3, 5, 8, 13, 32, 50, 64, 100, 200)
    rows = [table.row(size, 100) for size in sizes]
    for row in rows:
        assert all(0 < ms < float("inf") for ms in row)
        assert all(left <= right * (1 + 1e-9) for left, right in zip(row, row[1:], strict=False))
    for smaller, larger in zip(rows, rows[1:], strict=False):
        assert all(left <= right * (1 + 1e-9) for left, right in zip(smaller, larger, strict=True))


@given(st.sampled_from(SIZES), st.sampled_from(WIDTHS))
def test_what_was_calibrated_is_read_back(size, width):
    assert CostTable.calibrated(POINTS).milliseconds(size, width) == pytest.approx(POINTS[size, width])


def test_batch_sizes_lie_on_the_line_between_and_beyond():
    table = CostTable.calibrated({(4, 1): 10.0, (8, 1): 14.0})
    assert [table.row(size)[0] for size in (2, 4, 6, 8, 16)] == pytest.approx([8, 10, 12, 14, 22])


def test_few_requests_never_cost_less_than_their_share():
    table = CostTable.calibrated({(8, 1): 10.0, (16, 1): 30.0})  # the line reaches zero at 4 requests
    assert table.row(4)[0] == pytest.approx(5)


@pytest.mark.parametrize("points", [POINTS, {}], ids=["calibrated", "not calibrated"])
def test_an_outlier_moves_a_settled_table_by_a_few_percent(points):
    table = CostTable(WIDTHS, points)
    for _ in range(100):
        table.observe(8, 4, 0, POINTS[8, 4])
    before = table.row(8)
    for ten_times in (10.0, 0.1):
        table.observe(8, 4, 0, POINTS[8, 4] * ten_times)
        assert table.row(8) == pytest.approx(before, rel=0.12)


def test_a_machine_that_gets_slower_is_followed_within_50_steps_in_unvisited_cells_too():
    table, random = CostTable.calibrated(POINTS), Random(0)
    for slower, steps in ((1, 200), (2, 50)):
        for _ in range(steps):
            table.observe(8, 4, 0, slower * POINTS[8, 4] * random.lognormvariate(0, 0.05))
    assert table.milliseconds(8, 4) == pytest.approx(2 * POINTS[8, 4], rel=0.1)
    for cell in ((1, 1), (32, 16)):
        assert table.milliseconds(*cell) == pytest.approx(2 * POINTS[cell], rel=0.2)


def test_a_wrong_cell_is_corrected_without_moving_the_others():
    table = CostTable.calibrated({**POINTS, (8, 4): 1.3 * POINTS[8, 4]})
    for _ in range(60):
        table.observe(8, 2, 0, POINTS[8, 2])
    for _ in range(30):
        table.observe(8, 4, 0, POINTS[8, 4])
    assert table.milliseconds(8, 4) == pytest.approx(POINTS[8, 4], rel=0.05)
    assert table.milliseconds(8, 16) == pytest.approx(POINTS[8, 16], rel=0.1)


def test_without_calibration_the_first_steps_give_the_scale_and_the_shape():
    table = CostTable(WIDTHS)
    for width in (*WIDTHS, *WIDTHS):
        table.observe(8, width, 0, POINTS[8, width])
    assert table.row(8) == pytest.approx([POINTS[8, width] for width in WIDTHS], rel=0.1)


def test_without_calibration_unseen_cells_lie_on_the_plane_through_the_seen_ones():
    table = CostTable(WIDTHS)
    for size in (1, 8) * 4:
        for width in WIDTHS:
            table.observe(size, width, 0, 10 + 0.2 * size * width)
    assert table.milliseconds(32, 16) == pytest.approx(10 + 0.2 * 32 * 16, rel=0.2)
    assert table.milliseconds(4, 4) == pytest.approx(10 + 0.2 * 16, rel=0.1)


def test_the_context_is_told_apart_from_a_slower_machine():
    table, random = CostTable.calibrated(POINTS), Random(0)
    for _ in range(600):
        width, context = random.choice(WIDTHS), random.randint(0, 20_000)
        table.observe(8, width, context, POINTS[8, width] + 0.001 * context)
    assert table.per_token == pytest.approx(0.001, rel=0.15)
    assert table.milliseconds(8, 1) == pytest.approx(POINTS[8, 1], rel=0.1)
    assert table.milliseconds(8, 1, 10_000) == pytest.approx(POINTS[8, 1] + 10, rel=0.1)


def test_a_verified_token_costs_the_slope_between_neighbouring_widths():
    table = CostTable.calibrated(POINTS)
    slope = (POINTS[8, 8] - POINTS[8, 4]) / (8 * 4)
    assert table.per_verified_token(8, 8) == pytest.approx(slope)
    assert CostTable.calibrated({(1, 4): 10.0}).per_verified_token(1, 4) == 0


def test_what_a_cut_saves_does_not_lower_the_price_of_a_verified_token():
    table = CostTable.calibrated(POINTS)
    before = table.per_verified_token(32, 16)
    for _ in range(100):
        table.observe(32, 16, 0, POINTS[32, 4])
        table.observe(32, 4, 0, POINTS[32, 4])
    assert table.per_verified_token(32, 16) > 0.5 * before


def test_unknown_widths_and_impossible_times_are_left_out():
    table = CostTable.calibrated(POINTS)
    before = table.row(8)
    for width, ms in ((3, 5.0), (4, 0.0), (4, -1.0), (4, float("inf")), (4, float("nan"))):
        table.observe(8, width, 0, ms)
    assert table.row(8) == before and table.measured == 0


def test_a_table_survives_json():
    table = CostTable.calibrated(POINTS, per_token=0.002)
    table.observe(8, 4, 100, 2 * POINTS[8, 4])
    again = CostTable.from_dict(json.loads(json.dumps(table.as_dict())))
    for size in (1, 5, 32):
        assert again.row(size, 1000) == pytest.approx(table.row(size, 1000), rel=0.02)


def test_a_step_that_did_more_than_its_width_asks_for_can_only_lower_it():
    table = CostTable.calibrated(POINTS)
    before = table.row(8)
    table.observe(8, 4, 0, 2 * POINTS[8, 4], at_most=True)
    assert table.row(8) == before and table.measured == 0
    for _ in range(20):
        table.observe(8, 4, 0, 0.6 * POINTS[8, 4], at_most=True)
    assert table.milliseconds(8, 4) < 0.8 * POINTS[8, 4]
