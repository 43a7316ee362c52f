"""The tokens of a full block on an adaptive server: measured by the probe, or by the server's survival curve."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.diagnose.client import Generation
from sglang_dflash.diagnose.probe import Answer, Probe
from sglang_dflash.diagnose.verdict import Reference, judge
from tests.diagnose.test_verdict import SERVER

KNOWN = Reference("its card", False, 16, {"math": 11.2})


def probe(width: float, accept_length: int) -> Probe:
    steps, accepted = 10, [0] * 15
    accepted[accept_length - 1] = steps
    meta = {"completion_tokens": steps * accept_length, "spec_verify_ct": steps, "spec_cap_length": width}
    generation = Generation(meta | {"spec_correct_drafts_histogram": accepted}, 0.1, 1.0)
    answer = Answer("math", 0.0, generation)
    return Probe("chat template", (), answers=(answer,))


@pytest.mark.parametrize(
    ("width", "accept_length", "expected", "measured"),
    [
        (16, 11, 7.7, 11),  # the curve leaves out copied blocks
        (15, 4, 9.0, 4),  # the curve still contains its prior
        (6, 5, 9.0, 9.0),  # a block of 6 has no later drafts
        (6, 5, 4.0, 5),
        (16, 11, None, 11),
    ],
)
def test_a_probe_at_about_the_blocks_width_is_not_replaced_by_survival(
    width: float, accept_length: int, expected: float | None, measured: float
) -> None:
    served = replace(SERVER, adaptive=expected is not None, expected_per_block=expected, recent_accept_length=None)
    report = judge(served, [probe(width, accept_length), probe(width, accept_length)], KNOWN)
    assert report.findings.measured == pytest.approx(measured)
    assert bool(report.verdict) == (measured < 0.7 * 11.2)
