"""The tokens of a full block on an adaptive server: what a probe measured, or what the server's survival adds to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.diagnose.answers import RequestRecord, RunKey
from sglang_dflash.diagnose.probes import Probe
from sglang_dflash.diagnose.reference import Reference
from sglang_dflash.diagnose.session import judge
from tests.diagnose.test_verdict import SERVER

KNOWN = Reference("its card", False, 16, {"math": 11.2})


def probe(width: float, accept_length: int) -> Probe:
    steps, drafts = 10, [0] * 15
    drafts[accept_length - 1] = steps
    tokens = steps * accept_length
    answer = RequestRecord(
        RunKey("", "", 1, 0), "math/0", 0, "", 5, 0, tokens, 0.0, 0.1, 1.0, "stop", steps, drafts, width=width
    )
    return Probe("chat template", (), users=1, requests=(answer,))


@pytest.mark.parametrize(
    ("width", "accept_length", "expected", "measured"),
    [
        (16, 11, 7.7, 11),  # the survival of blocks without a match, where copies brought much
        (15, 4, 9.0, 4),  # the survival's prior
        (6, 5, 9.0, 9.0),  # a block of 6 shows nothing of later drafts
        (6, 5, 4.0, 5),
        (16, 11, None, 11),
    ],
)
def test_a_probe_at_about_the_blocks_width_is_not_replaced_by_survival(
    width: float, accept_length: int, expected: float | None, measured: float
) -> None:
    served = replace(SERVER, adaptive=expected is not None, expected=expected, so_far=None)
    report = judge(served, [probe(width, accept_length), probe(width, accept_length)], KNOWN)
    assert report.findings.measured == pytest.approx(measured)
    assert bool(report.verdict) == (measured < 0.7 * 11.2)
