"""The width policy's interface, and the policy that never changes its mind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


class WidthPolicy(Protocol):
    """Chooses each step's block width."""

    @property
    def max_width(self) -> int:
        """Widest block it will ever ask for; KV slots and graphs are provided for it."""

    def width(self, batch_size: int) -> int:
        """Positions of the next block, anchor included: 1 (plain decoding) to ``max_width``."""

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Take note of a finished step: its width and every request's accepted drafts plus bonus token."""


@dataclass(frozen=True)
class FixedWidth:
    """Always the full block."""

    max_width: int

    def width(self, batch_size: int) -> int:
        return self.max_width

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        pass
