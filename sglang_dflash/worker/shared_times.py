"""Share rank 0's step times with all tensor-parallel ranks so that they choose the same width.

A width policy is a function of its observations (:mod:`sglang_dflash.width.policy`). Accept counts are equal on all
ranks because the tokens are; measured times are not. So rank 0 appends its times to the list of requests that SGLang
broadcasts at the start of every iteration of its event loop, and every rank, rank 0 included, applies them there. This
adds no message and no wait. The message carries a fingerprint of the policy: ranks that diverge would choose different
widths and deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.observe.metrics import StepRecord

StepTime = tuple[int, int, int, float, bool]  # arguments of ``WidthPolicy.observe_time``


@dataclass(frozen=True)
class StepTimes:
    """Rank 0's message among the requests.

    Attributes:
        steps: times of finished steps.
        fingerprint: state of rank 0's policy before it applies them.
    """

    steps: tuple[StepTime, ...]
    fingerprint: int


class SharedTimes:
    """Broadcasts rank 0's step times with the requests.

    Args:
        policy: returns this rank's width policy, which start-up replaces.
        ranks: number of tensor-parallel ranks.
    """

    def __init__(self, policy: Callable[[], WidthPolicy], ranks: int) -> None:
        self._policy, self._alone = policy, ranks == 1
        self._outgoing: list[StepTime] = []

    def add(self, records: Sequence[StepRecord]) -> None:
        """Add steps that this rank has timed."""
        for record in records:
            assert record.milliseconds is not None
            time = (record.batch_size, record.width, record.context, record.milliseconds, record.caught_up)
            if self._alone:
                self._policy().observe_time(*time)
            else:
                self._outgoing.append(time)

    def broadcast(self, send: Callable[[list[Any] | None], list[Any]], requests: list[Any] | None) -> list[Any]:
        """Broadcast the requests with rank 0's new step times, and apply the times.

        Args:
            send: broadcasts the source rank's list, and returns it on every rank.
            requests: on the source rank; None elsewhere.

        Raises:
            DFlashError: this rank's policy differs from rank 0's.
        """
        if self._alone:
            return send(requests)
        if requests is not None and self._outgoing:
            requests = [*requests, StepTimes(tuple(self._outgoing), self._policy().fingerprint())]
        self._outgoing.clear()  # other ranks' times are discarded
        received = send(requests)
        for message in received:
            if isinstance(message, StepTimes):
                self._apply(message)
        return [message for message in received if not isinstance(message, StepTimes)]

    def _apply(self, message: StepTimes) -> None:
        policy = self._policy()
        if policy.fingerprint() != message.fingerprint:
            raise DFlashError(
                "tensor-parallel ranks committed different tokens than rank 0, or timed different steps",
                expected="the same accept lengths on every rank, so that all choose the same width",
                remedy="report this with the log; until then start without --speculative-adaptive",
            )
        for time in message.steps:
            policy.observe_time(*time)


_current: SharedTimes | None = None


def current() -> SharedTimes | None:
    """Return the shared times of this process's worker; None before the worker is built."""
    return _current


def set_current(times: SharedTimes) -> None:
    """Set the shared times of this process's worker."""
    global _current
    _current = times
