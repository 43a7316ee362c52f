"""Give every tensor-parallel rank rank 0's step times, so that all choose the same width.

A width policy is a function of what it is told (:mod:`sglang_dflash.width.policy`). Accept counts are equal on all
ranks because the tokens are; measured times are not. So rank 0's times ride on the list of requests that SGLang
broadcasts at the top of every turn of its event loop. Each rank, rank 0 included, takes note of them there: at the same
place in the same order of events. No message is added, and nobody waits. The policy's fingerprint rides along: ranks
that were told different things would choose different widths, and wait for each other for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.width import WidthPolicy
from sglang_dflash.worker.observe.metrics import StepRecord

StepTime = tuple[int, int, int, float, bool]


@dataclass(frozen=True)
class StepTimes:
    """Rank 0's message among the requests.

    Attributes:
        steps: arguments of ``WidthPolicy.observe_time`` for finished steps.
        fingerprint: of its policy before it takes note of them.
    """

    steps: tuple[StepTime, ...]
    fingerprint: int


class SharedTimes:
    """Carries what a rank measured to all ranks.

    Args:
        policy: the width policy of this rank; asked anew each time, as a start replaces it.
        ranks: tensor-parallel ranks that serve the same batch.
    """

    def __init__(self, policy: Callable[[], WidthPolicy], ranks: int) -> None:
        self._policy, self._alone = policy, ranks == 1
        self._outgoing: list[StepTime] = []

    def add(self, records: Sequence[StepRecord]) -> None:
        """Note that these steps' times are known on this rank."""
        for record in records:
            assert record.milliseconds is not None
            news = (record.batch_size, record.width, record.context, record.milliseconds, record.caught_up)
            if self._alone:
                self._policy().observe_time(*news)
            else:
                self._outgoing.append(news)

    def broadcast(self, send: Callable[[list[Any] | None], list[Any]], requests: list[Any] | None) -> list[Any]:
        """Send what was measured along with the requests.

        Args:
            send: broadcasts the source rank's list, and returns it on every rank.
            requests: on the source rank; None elsewhere.

        Raises:
            DFlashError: this rank's policy was told something else than rank 0's.
        """
        if self._alone:
            return send(requests)
        if requests is not None and self._outgoing:
            requests = [*requests, StepTimes(tuple(self._outgoing), self._policy().fingerprint())]
        self._outgoing.clear()  # other ranks' measurements are of no use
        received = send(requests)
        for message in received:
            if isinstance(message, StepTimes):
                self._apply(message)
        return [message for message in received if not isinstance(message, StepTimes)]

    def _apply(self, message: StepTimes) -> None:
        policy = self._policy()
        if policy.fingerprint() != message.fingerprint:
            raise DFlashError(
                "tensor-parallel ranks committed different tokens, or measured other steps, than rank 0",
                expected="the same accept lengths on every rank, from which each chooses the next width",
                remedy="report it with the log; until then leave --speculative-adaptive out",
            )
        for news in message.steps:
            policy.observe_time(*news)


_current: SharedTimes | None = None


def current() -> SharedTimes | None:
    """The shared times of this process's worker; None before it is built."""
    return _current


def set_current(times: SharedTimes) -> None:
    """Note the shared times of this process's worker."""
    global _current
    _current = times
