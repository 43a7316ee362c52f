"""A better ``mamba_full_memory_ratio`` than SGLang's fixed 0.9: states for the requests asked for, the rest for K/V.

More states than those requests hold serve the prefix cache, so a ratio that is enough is never lowered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from sglang_dflash.memory.fit import Demand, Fit, fit

MIN_TOKENS = 2048  # of K/V for each running request, a short chat: with less, requests wait for K/V instead of states
_HIGHEST = 10


def share(demand: Demand, static_bytes: float, *, replay: bool) -> float:
    """The lowest ratio, in tenths from the demand's on, that lets every request run; or else the most.

    The demand's own where none is better.
    """
    tenths = range(int(demand.state_share * 10) + 1, _HIGHEST * 10 + 1)
    ratios = [demand.state_share, *(each / 10 for each in tenths)]
    fits = [fit(replace(demand, state_share=ratio), static_bytes, replay=replay) for ratio in ratios]
    return ratios[best(fits, demand.max_running)]


def best(fits: Iterable[Fit], asked: int) -> int:
    """Which of some divisions is the first to let ``asked`` requests run, or else the most, without starving them."""
    running = [min(asked, fitted.running) if _feeds(fitted) else 0 for fitted in fits]
    return running.index(max(running))


def _feeds(fitted: Fit) -> bool:
    return fitted.tokens >= fitted.running * MIN_TOKENS
