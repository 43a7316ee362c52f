"""Give every tensor-parallel rank rank 0's step times, so that all choose the same width.

A width policy is a function of what it is told (:mod:`sglang_dflash.width.policy`). Accept counts are equal on all
ranks because the tokens are; measured times are not. So rank 0's times ride on the list of requests that SGLang
broadcasts at the top of every turn of its event loop. Each rank, rank 0 included, takes note of them there: at the same
place in the same order of events. No message is added, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.worker.observe.observer import StepRecord

News = tuple[int, int, int, float, bool]


@dataclass(frozen=True)
class StepTimes:
    """Rank 0's message among the requests: the arguments of ``WidthPolicy.observe_time`` for finished steps."""

    steps: tuple[News, ...]


class SharedTimes:
    """Carries what a rank measured to all ranks.

    Args:
        take_note: ``WidthPolicy.observe_time`` of this rank.
        ranks: tensor-parallel ranks that serve the same batch.
    """

    def __init__(self, take_note: Callable[[int, int, int, float, bool], None], ranks: int) -> None:
        self._take_note, self._alone = take_note, ranks == 1
        self._outgoing: list[News] = []

    def measured(self, records: Sequence[StepRecord]) -> None:
        """Note that these steps' times are known on this rank."""
        for record in records:
            assert record.milliseconds is not None
            news = (record.batch_size, record.width, record.context, record.milliseconds, record.caught_up)
            if self._alone:
                self._take_note(*news)
            else:
                self._outgoing.append(news)

    def ride(self, broadcast: Callable[[list[Any] | None], list[Any]], requests: list[Any] | None) -> list[Any]:
        """Send what was measured along with the requests.

        Args:
            broadcast: sends the source rank's list, and returns it on every rank.
            requests: on the source rank; None elsewhere.
        """
        if self._alone:
            return broadcast(requests)
        if requests is not None and self._outgoing:
            requests = [*requests, StepTimes(tuple(self._outgoing))]
        self._outgoing.clear()  # other ranks' measurements are of no use
        received = broadcast(requests)
        for message in received:
            if isinstance(message, StepTimes):
                for news in message.steps:
                    self._take_note(*news)
        return [message for message in received if not isinstance(message, StepTimes)]


_serving: SharedTimes | None = None


def serving() -> SharedTimes | None:
    """The shared times of this process's worker; None before it is built."""
    return _serving


def serve_times(times: SharedTimes) -> None:
    """Note the shared times of this process's worker."""
    global _serving
    _serving = times
