"""Is the block too wide for the load? An estimate from two step times and the survival of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from sglang_dflash.diagnose.answers import RequestRecord, accepted_histogram
from sglang_dflash.diagnose.probes import Probe

_WIDTHS = (2, 3, 4, 6, 8, 12)


@dataclass(frozen=True)
class Load:
    """A probe's steps.

    Attributes:
        users, at_once: users who asked, and requests being answered at a time, in the mean.
        width: mean positions of a block.
        accept_length: tokens per step.
        step_ms: decode time of a step, the median over answers: a machine may be busy for a while.
    """

    users: int
    at_once: float
    width: float
    accept_length: float
    step_ms: float

    @classmethod
    def of(cls, probe: Probe) -> Load:
        steps = [(r.latency_s - r.ttft_s) / r.verify_steps for r in probe.requests if r.verify_steps]
        return cls(probe.users, probe.at_once, probe.width, probe.accept_length(), 1000 * median(steps))

    @property
    def positions(self) -> float:
        """That a step verifies, of all requests."""
        return self.at_once * self.width


@dataclass(frozen=True)
class Narrower:
    """The estimate of a better width.

    Attributes:
        width: with the most tokens per millisecond.
        gain: its tokens per millisecond over those of the served width.
    """

    width: int
    gain: float


def survival(requests: Sequence[RequestRecord], block: int) -> list[float]:
    """Share of the steps whose draft j was committed, j = 1 ... block - 1."""
    histogram = accepted_histogram(requests)
    steps = sum(histogram)
    return [sum(histogram[j:]) / steps if steps else 0.0 for j in range(1, block)]


def narrower(one: Load, many: Load, curve: Sequence[float], block: int) -> Narrower:
    """Estimate the best fixed width at the load of ``many``.

    A step's time is taken for a straight line in the positions that it verifies; two loads give its two parameters.
    The line leaves out that a request also costs by itself, so the gain is an estimate.

    Args:
        curve: chance that draft j is committed, j = 1 ... block - 1.
    """
    per_position = max(0.0, (many.step_ms - one.step_ms) / max(1.0, many.positions - one.positions))
    fixed = max(0.0, one.step_ms - per_position * one.positions)

    def rate(width: int) -> float:
        return (1 + sum(curve[: width - 1])) / (fixed + per_position * many.at_once * width)

    best = max((*(width for width in _WIDTHS if width < block), block), key=rate)
    return Narrower(best, rate(best) / rate(block))
