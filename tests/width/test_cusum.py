"""The CUSUM's formula and its restart."""

from __future__ import annotations

import pytest

from sglang_dflash.width.cusum import CERTAIN, TILT, Cusum


def test_the_score_adds_log_likelihood_ratios_restarts_at_zero_and_ends_in_certainty():
    test = Cusum("before")
    assert not test.is_certain(2.0, 1.0)
    assert test.score == pytest.approx(TILT * 2 - TILT**2 / 2) and test.rose
    test.is_certain(-5.0, 1.0)
    assert test.score == 0 and not test.rose and test.before == "before"
    steps = 1
    while not test.is_certain(1.0, 0.2):
        steps += 1
    assert steps == int(CERTAIN / (TILT - TILT**2 / 2 * 0.2)) + 1
