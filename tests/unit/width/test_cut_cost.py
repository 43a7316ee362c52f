"""What a cut saves: told apart from what it costs, and not cut where it does not pay."""

from __future__ import annotations

from math import inf

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable
from sglang_dflash.width.cut_cost import CutCost
from tests.unit.width.traffic import WIDTHS, Machine

POINTS = Machine(3).points((1, 8, 32))
CUTS = {8: CutCost(6.0, 0.1), 32: CutCost(3.0, 0.2)}


def test_overhead_and_saving_are_told_apart_by_two_steps() -> None:
    found = CutCost.of_steps(40.0, (60, 40.0), (100, 36.0))  # 0.1 ms a position; 6 ms before the first
    assert found == pytest.approx((6.0, 0.1)) and found.least == 60


@pytest.mark.parametrize(("some", "most"), [((60, 50.0), (100, 50.0)), ((60, 50.0), (100, 55.0))])
def test_a_cut_that_saves_nothing_never_pays(some: tuple[int, float], most: tuple[int, float]) -> None:
    assert CutCost.of_steps(40.0, some, most).least == inf


def test_a_cut_without_overhead_pays_from_the_first_position() -> None:
    assert CutCost.of_steps(40.0, (50, 34.0), (100, 28.0)).least == 0


def test_the_nearest_batch_size_tells_and_one_request_alone_just_gets_a_narrower_block() -> None:
    table = CostTable.calibrated(POINTS, cuts=CUTS)
    assert table.cut(4, 16) == table.cut(8, 16) == CUTS[8] and table.cut(30, 16) == CUTS[32]
    assert table.cut(1, 16) == (0.0, table.per_verified_token(1, 16))
    assert CostTable.calibrated(POINTS).cut(8, 16) == (0.0, table.per_verified_token(8, 16))


def test_the_policy_says_how_many_must_go() -> None:
    policy = AdaptiveWidth(WIDTHS, CostTable.calibrated(POINTS, cuts=CUTS))
    assert policy.width(8) > 1
    assert policy.least_cut(8) == 60
    assert policy.cut(8) == pytest.approx(policy.tokens_per_ms * 0.1)
    never = AdaptiveWidth(WIDTHS, CostTable.calibrated(POINTS, cuts={8: CutCost(6.0, 0.0)}))
    assert never.width(8) > 1 and never.cut(8) == 0 and never.least_cut(8) == inf
