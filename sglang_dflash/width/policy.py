"""The interface of a width policy, and the two policies that learn nothing: fixed and random widths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol


@dataclass(frozen=True)
class Prospect:
    """Expected gain of drafting over plain decoding."""

    width: int  # of the best block with a draft
    first_accepted: float  # share of first drafts that the target accepts
    tokens: float  # committed per request by a step of that width
    cost: float  # time of such a step over that of a plain one, at the same batch size

    def __str__(self) -> str:
        return (
            f"a block of {self.width} yields {self.tokens:.2f} tokens but takes {self.cost:.2f} times as long as a "
            f"plain step ({self.first_accepted:.0%} of first drafts accepted)"
        )


class WidthPolicy(Protocol):
    """Chooses each step's block width; every tensor-parallel rank has its own.

    A policy is a function of the calls it received: no clock, no unseeded randomness. So ranks that receive the same
    calls in the same order choose the same widths.
    """

    @property
    def widths(self) -> tuple[int, ...]: ...  # ascending; 1 is plain decoding, without the drafter

    @property
    def can_pause(self) -> bool: ...  # whether it compares blocks with plain decoding

    @property
    def paused(self) -> Prospect | None: ...  # gain of the best block while plain decoding is preferred; else None

    def prospect(self, *, alone: bool = False) -> Prospect | None:
        """Return the gain of the best block with a draft, for the last batch size or ``alone``, without copies.

        None unless :attr:`can_pause`.
        """

    def width(self, batch_size: int, context: int = 0, matching: float = 0.0) -> int:
        """Choose the positions of the next block, anchor included, out of ``widths``.

        Args:
            context: committed tokens, summed over the batch.
            matching: share of the batch's requests with a match, as last seen by the host.
        """

    def observe(self, width: int, accept_lens: Sequence[int], matched: Sequence[bool] = ()) -> None:
        """Record a finished step. Steps arrive in launch order, one step late.

        Args:
            accept_lens: per request, accepted drafts plus bonus token, 1 to ``width``.
            matched: per request, whether it had a match when the width was chosen; empty for none.
        """

    def observe_time(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        """Record a decode step's time; an upper bound with ``at_most``. Many steps may go unmeasured."""

    def describe(self) -> dict[str, Any]:
        """Return the policy's part of ``/server_info``, ready for JSON."""


class FixedWidth:
    """Always the widest of ``widths``."""

    can_pause = False
    paused: Prospect | None = None

    def __init__(self, *widths: int) -> None:
        self.widths = tuple(sorted(set(widths)))

    def prospect(self, *, alone: bool = False) -> Prospect | None:
        return None

    def width(self, batch_size: int, context: int = 0, matching: float = 0.0) -> int:
        return self.widths[-1]

    def observe(self, width: int, accept_lens: Sequence[int], matched: Sequence[bool] = ()) -> None:
        pass

    def observe_time(self, batch_size: int, width: int, milliseconds: float, at_most: bool = False) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"policy": "fixed", "widths": [self.widths[-1]]}


class RandomWidth(FixedWidth):
    """A width drawn uniformly for each step, for recordings and tests."""

    def __init__(self, *widths: int, seed: int = 0) -> None:
        super().__init__(*widths)
        self._random = Random(seed)

    def width(self, batch_size: int, context: int = 0, matching: float = 0.0) -> int:
        return self._random.choice(self.widths)

    def describe(self) -> dict[str, Any]:
        return {"policy": "random", "widths": list(self.widths)}
