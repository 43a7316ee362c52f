"""The grid of step times: what is measured stays, what is missing lies between, and isotonic regression."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.width import grid

times = st.floats(0.1, 1000)


def test_measured_points_stay_and_missing_ones_lie_on_the_line_between():
    points = {(1, 1): 10.0, (1, 4): 16.0, (8, 1): 20.0, (8, 4): 50.0}
    assert grid.complete(points, (1, 8), (1, 2, 4)) == [[10, 12, 16], [20, 30, 50]]


def test_a_batch_size_with_one_point_takes_the_rest_from_the_plane():
    exact = {(size, width): 5 + 0.5 * size * width for size in (1, 4) for width in (1, 2, 8)}
    sparse = {**exact, (16, 1): 5 + 0.5 * 16}
    assert grid.complete(sparse, (16,), (1, 8))[0] == pytest.approx([13, 69])


@given(st.floats(0.1, 50), st.floats(0.001, 5))
def test_the_plane_through_exact_points_is_found(a, b):
    points = {(size, width): a + b * size * width for size in (1, 3, 9) for width in (1, 2, 16)}
    assert grid.line(points) == pytest.approx((a, b), rel=1e-3)


@given(st.dictionaries(st.tuples(st.integers(1, 64), st.integers(1, 16)), times, max_size=12))
def test_the_plane_never_falls(points):
    a, b = grid.line(points)
    assert a >= 0 and b >= 0 and a + b > 0


def test_one_batch_size_gets_a_second_row_since_a_line_needs_two():
    assert grid.rows({(4, 1): 1.0, (4, 2): 2.0}) == (4, 8)
    assert grid.rows({}) == grid.BATCH_SIZES


weighted = st.lists(st.tuples(times, st.floats(0.01, 100)), min_size=1, max_size=12)


@given(weighted)
def test_isotonic_never_falls_keeps_the_weighted_mean_and_leaves_what_never_fell(pairs):
    values, weights = [value for value, _ in pairs], [weight for _, weight in pairs]
    found = grid.isotonic(values, weights)
    assert all(left <= right + 1e-9 for left, right in zip(found, found[1:], strict=False))
    mean, expected = (
        sum(map(float.__mul__, row, weights)) for row in (list(map(float, found)), list(map(float, values)))
    )
    assert mean == pytest.approx(expected)
    ascending = sorted(values)
    assert grid.isotonic(ascending, weights) == ascending


def test_isotonic_believes_the_better_known_neighbour():
    assert grid.isotonic([40.0, 30.0], [1.0, 99.0]) == pytest.approx([30.1, 30.1])
