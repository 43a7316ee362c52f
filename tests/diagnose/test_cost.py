"""The estimate of a narrower block, on servers whose step times are known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.diagnose.answers import RequestRecord, RunKey
from sglang_dflash.diagnose.cost import Load, narrower, survival
from sglang_dflash.diagnose.probes import Probe

BLOCK = 16


def load(users: int, fixed_ms: float, position_ms: float) -> Load:
    return Load(users, float(users), BLOCK, 3.0, fixed_ms + position_ms * users * BLOCK)


def geometric(hazard: float) -> list[float]:
    return [hazard**j for j in range(1, BLOCK)]


def test_free_positions_keep_the_block() -> None:
    best = narrower(load(1, 10, 0.0), load(8, 10, 0.0), geometric(0.6), BLOCK)
    assert (best.width, best.gain) == (BLOCK, 1.0)


def test_dear_positions_want_the_width_that_brings_most() -> None:
    curve, fixed, each = geometric(0.6), 10.0, 0.5
    best = narrower(load(1, fixed, each), load(8, fixed, each), curve, BLOCK)
    rates = {w: (1 + sum(curve[: w - 1])) / (fixed + each * 8 * w) for w in (2, 3, 4, 6, 8, 12, 16)}
    assert best.width == max(rates, key=rates.__getitem__) < BLOCK
    assert best.gain == pytest.approx(rates[best.width] / rates[BLOCK])


def test_a_drafter_that_is_always_right_keeps_the_block() -> None:
    assert narrower(load(1, 10, 0.1), load(8, 10, 0.1), geometric(1.0), BLOCK).width == BLOCK


def test_a_slower_single_user_is_noise_not_a_gain() -> None:
    assert narrower(load(8, 20, 0.0), replace(load(8, 10, 0.0), users=8), geometric(0.9), BLOCK).gain == 1.0


def answer(start_s: float, seconds: float, drafts: list[int], width: float) -> RequestRecord:
    tokens = 1 + sum((k + 1) * n for k, n in enumerate(drafts))
    return RequestRecord(
        RunKey("", "", 2, 0),
        "math/0/0",
        0,
        "",
        5,
        0,
        tokens,
        start_s,
        0.0,
        seconds,
        "stop",
        sum(drafts),
        drafts,
        width=width,
    )


def test_a_probe_counts_widths_requests_at_once_and_survival() -> None:
    probe = Probe("", (), users=2, requests=(answer(0, 2.0, [1, 0, 1], 8), answer(0, 1.0, [2, 1, 3], 4)))
    measured = Load.of(probe)
    assert measured.width == pytest.approx((8 * 2 + 4 * 6) / 8)
    assert measured.at_once == pytest.approx(1.5)
    assert measured.step_ms == pytest.approx((1000 + 1000 / 6) / 2)
    assert survival(probe.requests, 4) == [5 / 8, 4 / 8, 0.0]
