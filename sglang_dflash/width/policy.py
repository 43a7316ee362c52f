"""The interface of width policies, and the policy of a fixed width."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

BUCKETS, BUCKET = 5, 4  # number of buckets, and match lengths per bucket; bucket 0 is no match


@dataclass(frozen=True)
class ExpectedGain:
    """Expected gain of drafting over plain decoding."""

    width: int
    first_accepted: float  # share of first drafts
    tokens: float  # per request and step
    cost: float  # relative to a plain step

    def __str__(self) -> str:
        return (
            f"a block of {self.width} yields {self.tokens:.2f} tokens but takes {self.cost:.2f} times as long as a "
            f"plain step ({self.first_accepted:.0%} of first drafts accepted)"
        )


class WidthPolicy:
    """Picks each step's block width, here always the widest.

    A policy is a function of its calls (no clock, no randomness), so ranks pick equal widths.

    Attributes:
        widths: ascending; 1 is plain decoding, without the drafter.
        can_pause: whether the policy compares blocks with plain decoding.
        paused: gain of the best block while plain decoding is preferred, else None.
    """

    can_pause = False
    paused: ExpectedGain | None = None

    def __init__(self, *widths: int) -> None:
        self.widths = tuple(sorted(set(widths)))

    def width(self, batch_size: int, matches: Sequence[int] = ()) -> int:
        """Return the positions of the next block, anchor included, out of ``widths``.

        Args:
            matches: number of requests in each of ``BUCKETS``, one step late; only the shares count.
        """
        return self.widths[-1]

    def expected_gain(self, *, alone: bool = False) -> ExpectedGain | None:
        """Return the gain of the best block with a draft, without copies, for the last batch size or ``alone``."""
        return None

    def observe(self, width: int, accept_lens: Sequence[int], buckets: Sequence[int] = ()) -> None:
        """Record a finished step, in launch order, one step late.

        Args:
            accept_lens: per request, accepted drafts plus bonus token, 1 to ``width``.
            buckets: per request, its bucket when the width was chosen; empty without copies.
        """

    def forget(self) -> None:
        """Drop observed accept lengths, but not times: a model's weights have changed."""

    def observe_time(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        """Record a decode step's time; an upper bound with ``at_most``."""

    def state_hash(self) -> int:
        """Return a hash of the state that decides the next width."""
        return 0

    def describe(self) -> dict[str, Any]:
        """Return the policy's part of ``/server_info``."""
        return {"policy": "fixed", "widths": list(self.widths)}
