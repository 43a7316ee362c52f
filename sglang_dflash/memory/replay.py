"""Two ways to return to a state inside a block, weighed: keep every state, or keep what tokens wrote and add it up."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.memory.fit import Demand, fit
from sglang_dflash.memory.units import size

_SHORTEST_RING = 16  # SGLang's kernels multiply tiles of 16 positions or more


def ring_length(block: int) -> int:
    """Positions of a request's records: the fewest that hold a block of ``block`` tokens, a power of two.

    A ring this short is full after every verify, so every commit brings the state up to date: the prefix cache never
    gets a stale one, and the next block may be of any width.
    """
    return max(_SHORTEST_RING, 1 << (block - 1).bit_length())


@dataclass(frozen=True)
class Weighed:
    """Scratch of a request, bytes, and requests that run at once, with states kept and with states replayed."""

    asked: int
    scratch_kept: int
    scratch_replayed: int
    running_kept: int
    running_replayed: int

    def __str__(self) -> str:
        return (
            f"{size(self.scratch_replayed)} of scratch a request replayed, {size(self.scratch_kept)} kept; of "
            f"{self.asked} requests {self.running_replayed} run at once replayed, {self.running_kept} kept"
        )


def weigh(demand: Demand, static_bytes: float) -> Weighed:
    """Divide ``static_bytes`` both ways."""
    return Weighed(
        asked=demand.max_running,
        scratch_kept=demand.scratch(replay=False),
        scratch_replayed=demand.scratch(replay=True),
        running_kept=fit(demand, static_bytes).running,
        running_replayed=fit(demand, static_bytes, replay=True).running,
    )


def worth_it(demand: Demand, static_bytes: float) -> bool:
    """Whether more of the requests that were asked for run at once if states are replayed."""
    weighed = weigh(demand, static_bytes)
    return weighed.running_kept < weighed.running_replayed
