"""The estimate of a smaller block, with given step times."""

from __future__ import annotations

import pytest

from sglang_dflash.diagnose.client import Generation
from sglang_dflash.diagnose.probe import Answer, Load, Probe
from sglang_dflash.diagnose.verdict import smaller_block, survival

BLOCK = 16


def load(users: int, fixed_ms: float, position_ms: float) -> Load:
    return Load(users, BLOCK, fixed_ms + position_ms * users * BLOCK)


def geometric(hazard: float) -> list[float]:
    return [hazard**j for j in range(1, BLOCK)]


def test_free_positions_keep_the_block() -> None:
    best = smaller_block(load(1, 10, 0.0), load(8, 10, 0.0), geometric(0.6), BLOCK)
    assert (best.block, best.gain) == (BLOCK, 1.0)


def test_costly_positions_select_the_block_with_the_highest_throughput() -> None:
    curve, fixed, each = geometric(0.6), 10.0, 0.5
    best = smaller_block(load(1, fixed, each), load(8, fixed, each), curve, BLOCK)
    rates = {w: (1 + sum(curve[: w - 1])) / (fixed + each * 8 * w) for w in (2, 3, 4, 6, 8, 12, 16)}
    assert best.block == max(rates, key=rates.__getitem__) < BLOCK
    assert best.gain == pytest.approx(rates[best.block] / rates[BLOCK])


def test_a_perfect_drafter_keeps_the_block() -> None:
    assert smaller_block(load(1, 10, 0.1), load(8, 10, 0.1), geometric(1.0), BLOCK).block == BLOCK


def test_a_slower_single_user_is_noise_not_a_gain() -> None:
    assert smaller_block(load(8, 20, 0.0), load(8, 10, 0.0), geometric(0.9), BLOCK).gain == 1.0


def answer(seconds: float, accepted: tuple[int, ...], width: float | None) -> Answer:
    meta = {"spec_verify_ct": sum(accepted), "spec_correct_drafts_histogram": accepted, "spec_cap_length": width}
    return Answer("math", 0.0, Generation(meta, 0.0, seconds))


def test_a_probe_measures_load_and_survival() -> None:
    probe = Probe("", (), users=2, answers=(answer(2.0, (1, 0, 1), None), answer(1.0, (2, 1, 3), 4)))
    measured = probe.load(8)
    assert measured.width == pytest.approx((8 * 2 + 4 * 6) / 8)
    assert measured.at_once == pytest.approx(1.5)
    assert measured.step_ms == pytest.approx((1000 + 1000 / 6) / 2)
    assert survival([probe], 4) == [5 / 8, 4 / 8, 0.0]
