"""The width policy's interface, and the two policies that learn nothing: the full block, and widths at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from sglang_dflash.width.breaker import Pause


class WidthPolicy(Protocol):
    """Chooses each step's block width, on every tensor-parallel rank by itself.

    A policy is a function of the calls it got: no clock, no unseeded randomness. Ranks that are told the same in the
    same order choose the same.
    """

    @property
    def widths(self) -> tuple[int, ...]:
        """Every width it may ask for, ascending; 1 is plain decoding, for which the drafter does not run."""

    @property
    def max_width(self) -> int:
        """The last of ``widths``; KV slots and graphs are provided for it."""

    @property
    def paused(self) -> Pause | None:
        """Why the drafter rests, while plain decoding is the fastest; otherwise None."""

    def width(self, batch_size: int, context: int = 0) -> int:
        """Positions of the next block, anchor included, out of ``widths``.

        Args:
            context: committed tokens of all requests of the batch together.
        """

    def observe(self, width: int, accept_lens: Sequence[int], verify_lens: Sequence[int] | None = None) -> None:
        """Take note of a finished step; steps come in launch order, one step late.

        Args:
            accept_lens: per request, accepted drafts plus bonus token: 1 to ``width``.
            verify_lens: per request, verified positions, anchor included; None if all ``width`` were.
        """

    def observe_time(
        self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False
    ) -> None:
        """Take note of how long a decode step took, from its start to the next one's. Many steps may go unmeasured.

        Args:
            at_most: the step did more than its width asks for, so one of that width takes no longer.
        """

    def cut(self, batch_size: int) -> float:
        """A drafted position is verified while the product of the drafter's probabilities up to it is at least this.

        It belongs to the width asked for last; 0.0 verifies the whole block.
        """

    def least_cut(self, batch_size: int) -> float:
        """Positions of the batch that a cut must leave out; with fewer, whole blocks are faster."""

    def describe(self) -> dict[str, Any]:
        """What ``/server_info`` shows of the policy, ready for JSON."""


class _Unlearned:
    """What a policy without statistics answers."""

    paused: Pause | None = None

    def observe(self, width: int, accept_lens: Sequence[int], verify_lens: Sequence[int] | None = None) -> None:
        pass

    def observe_time(
        self, batch_size: int, width: int, context: int, milliseconds: float, at_most: bool = False
    ) -> None:
        pass

    def cut(self, batch_size: int) -> float:
        return 0.0

    def least_cut(self, batch_size: int) -> float:
        return 1


@dataclass(frozen=True)
class FixedWidth(_Unlearned):
    """Always the full block."""

    max_width: int

    @property
    def widths(self) -> tuple[int, ...]:
        return (self.max_width,)

    def width(self, batch_size: int, context: int = 0) -> int:
        return self.max_width

    def describe(self) -> dict[str, Any]:
        return {"policy": "fixed", "widths": [self.max_width]}


class RandomWidth(_Unlearned):
    """Each step one of the widths, equally likely: what a recording needs from which other policies are to be judged.

    Args:
        widths: any order; repeated widths count once.
        seed: the same seed gives the same widths, and the same thresholds.
        ragged: cut requests at a threshold that is random too, for tests.
    """

    def __init__(self, widths: Sequence[int], seed: int = 0, *, ragged: bool = False) -> None:
        self.widths = tuple(sorted(set(widths)))
        self.max_width = self.widths[-1]
        self.ragged = ragged
        self._seed, self._random, self._thresholds = seed, Random(seed), Random(seed)

    def width(self, batch_size: int, context: int = 0) -> int:
        return self._random.choice(self.widths)

    def cut(self, batch_size: int) -> float:
        return self._thresholds.random() if self.ragged else 0.0

    def describe(self) -> dict[str, Any]:
        return {"policy": "random", "widths": list(self.widths), "seed": self._seed, "ragged": self.ragged}
