"""Tensor parallelism: every rank learns rank 0's step times, so that all choose the same width.

A width policy is a function of what it is told (:mod:`sglang_dflash.width.policy`). Accept counts are the same on all
ranks, because the tokens are; measured times are not. So rank 0's ride on the list of requests that SGLang broadcasts
at the top of every turn of its event loop, and each rank, rank 0 too, takes note of them there: at the same place in
the same order of events. Nothing is sent that was not sent before, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.worker.observe.steps import StepRecord

News = tuple[int, int, int, float, bool]


@dataclass(frozen=True)
class StepTimes:
    """Rank 0's news, among the requests: what ``WidthPolicy.observe_time`` takes, of finished steps."""

    steps: tuple[News, ...]


class SharedTimes:
    """What a rank measured, on its way to all ranks.

    Args:
        take_note: ``WidthPolicy.observe_time`` of this rank.
        ranks: tensor-parallel ranks that serve the same batch.
    """

    def __init__(self, take_note: Callable[[int, int, int, float, bool], None], ranks: int) -> None:
        self._take_note, self._alone = take_note, ranks == 1
        self._outgoing: list[News] = []

    def measured(self, records: Sequence[StepRecord]) -> None:
        """These steps' times are known on this rank."""
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
    """Those of this process's worker."""
    return _serving


def serve(times: SharedTimes) -> None:
    """This process's worker has these."""
    global _serving
    _serving = times
