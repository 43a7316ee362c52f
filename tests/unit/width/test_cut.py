"""The ragged cut on synthetic confidences: worth what the offline study says, and near the best threshold."""

from __future__ import annotations

from random import Random

import pytest

from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth, WidthPolicy
from tests.unit.width.traffic import WIDTHS, Machine

BATCH_SIZE = 8
DRAFT_SHARE = 0.1


def confidence(random: Random) -> float:
    """Of one draft, and its chance of being accepted: most are nearly certain, some are a guess."""
    return 0.98 if random.random() < 0.75 else 0.4


def block(width: int, threshold: float, random: Random) -> tuple[int, int]:
    """-> accepted drafts plus bonus, and verified positions with the anchor, of one request."""
    product, accepted, verified, alive = 1.0, 1, 1, True
    for _ in range(1, width):
        chance = confidence(random)
        product *= chance
        if product < threshold:
            break
        verified += 1
        alive = alive and random.random() < chance
        accepted += alive
    return accepted, verified


def tokens_per_ms(policy: WidthPolicy, ratio: float, threshold: float | None = None) -> float:
    """The long-run rate with the policy's own threshold, or a fixed one. A cut saves verification, not drafting."""
    machine, random, tokens, time = Machine(ratio), Random(0), 0, 0.0
    plain = machine.milliseconds(BATCH_SIZE, 1)
    for step in range(700):
        width = policy.width(BATCH_SIZE)
        kept = policy.cut(BATCH_SIZE) if threshold is None else threshold
        accept, verify = zip(*(block(width, kept, random) for _ in range(BATCH_SIZE)), strict=True)
        mean_verified = sum(verify) / BATCH_SIZE
        drafted = DRAFT_SHARE * (1 + (ratio - 1) * (width - 1) / 15) if width > 1 else 0
        ms = plain * (1 + (ratio - 1) * (mean_verified - 1) / 15 + drafted)
        policy.observe(width, accept, verify)
        policy.observe_time(BATCH_SIZE, width, 0, ms)
        if step >= 200:
            tokens, time = tokens + sum(accept), time + ms
    return tokens / time


@pytest.mark.parametrize("ratio, gain", [(1.5, 1.04), (3.0, 1.04), (8.0, 1.06)])
def test_the_cut_pays_and_is_near_the_best_threshold(ratio, gain):
    costs = Machine(ratio).points()
    cut, whole = (
        tokens_per_ms(AdaptiveWidth(WIDTHS, CostTable.calibrated(costs), ragged=ragged), ratio)
        for ragged in (True, False)
    )
    swept = max(
        tokens_per_ms(FixedWidth(width), ratio, threshold)
        for width in WIDTHS[1:]
        for threshold in (0.0, 0.1, 0.2, 0.3, 0.5, 0.7)
    )
    assert cut >= gain * whole
    assert cut >= 0.96 * swept


def test_where_verified_tokens_are_free_the_cut_costs_nothing():
    costs = Machine(1.02).points()
    cut, whole = (
        tokens_per_ms(AdaptiveWidth(WIDTHS, CostTable.calibrated(costs), ragged=ragged), 1.02)
        for ragged in (True, False)
    )
    assert cut == pytest.approx(whole, rel=0.02)
