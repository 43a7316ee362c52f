"""Counters of a worker, from counts that the host has anyway, one step late."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class StepStats:
    """Counters of one worker since it started.

    Attributes:
        widths: steps by block width.
        accept_lens: verified blocks by accept length (accepted drafts plus the bonus token).
    """

    widths: Counter[int] = field(default_factory=Counter)
    accept_lens: Counter[int] = field(default_factory=Counter)
    _running: deque[int] = field(default_factory=deque)

    def started(self, width: int) -> None:
        """Note a step that was launched; its result comes back later, in launch order."""
        self._running.append(width)

    def finished(self, accept_lens: Sequence[int]) -> int:
        """Count the oldest running step's result and return its width."""
        width = self._running.popleft()
        self.widths[width] += 1
        self.accept_lens.update(accept_lens)
        return width

    @property
    def mean_accept_length(self) -> float | None:
        """New tokens per verified block; None before the first."""
        blocks = sum(self.accept_lens.values())
        return sum(n * count for n, count in self.accept_lens.items()) / blocks if blocks else None

    def as_dict(self) -> dict[str, Any]:
        """For ``/server_info``: JSON has string keys only."""
        return {
            "steps_by_width": {str(width): n for width, n in sorted(self.widths.items())},
            "blocks_by_accept_length": {str(length): n for length, n in sorted(self.accept_lens.items())},
            "mean_accept_length": self.mean_accept_length,
        }
