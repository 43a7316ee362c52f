"""DP attention: ranks that serve different requests run every step together, with blocks of one width.

Before a step SGLang gathers a row of integers from every rank (``MLPSyncBatchInfo``). Our columns extend that row, so
all policies receive the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.policy import BUCKETS
from sglang_dflash.worker.flight import StepRecord

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import Req, ScheduleBatch

# Columns: the policy's state; the load; a finished step's width; a timed step (requests, width, nanoseconds, upper
# bound or not); the finished step's requests by bucket and accept length.
FINGERPRINT, REQUESTS, CONTEXT, MATCHES, WIDTH, TIMED = 0, 1, 2, slice(3, 3 + BUCKETS), 3 + BUCKETS, 4 + BUCKETS
COUNTS = TIMED + 4


class Load(NamedTuple):
    """The arguments of :meth:`WidthPolicy.width`."""

    batch_size: int
    context: int
    matches: Sequence[int]

    @classmethod
    def of(cls, batch: ScheduleBatch | None, buckets: Sequence[int]) -> Load:
        requests = 0 if batch is None else batch.batch_size()
        context = sum(batch.spec_info.committed_cpu) if batch is not None and requests else 0
        return cls(requests, context, [buckets.count(bucket) for bucket in range(BUCKETS)])


class Rounds:
    """This rank's part in the steps that all ranks run together.

    A width is chosen for the largest batch and context, to which other ranks are padded, and for the matches of all
    requests.

    Args:
        policy: equal on all ranks.
        buckets: returns each request's bucket of match length.
    """

    def __init__(self, policy: WidthPolicy, widest: int, buckets: Callable[[Sequence[Req]], Sequence[int]]) -> None:
        self._policy, self._widest, self._buckets = policy, widest, buckets
        self._finished: deque[StepRecord] = deque()
        self._timed: deque[StepRecord] = deque()
        self._news: Tensor | None = None  # not yet received by the policy
        self.load = Load.of(None, ())

    def finished(self, record: StepRecord, timed: Sequence[StepRecord]) -> None:
        """The policies of all ranks receive the steps at the next gather."""
        self._finished.append(record)
        self._timed.extend(timed)

    def row(self, batch: ScheduleBatch | None) -> Tensor:
        """Return this rank's columns, int64 [columns] on the host, before it runs ``batch``."""
        self._learn()  # before every choice of a width
        row = [0] * (COUNTS + BUCKETS * self._widest)
        row[FINGERPRINT] = self._policy.fingerprint()
        if batch is not None and batch.forward_mode.is_decode():
            row[REQUESTS], row[CONTEXT], row[MATCHES] = Load.of(batch, self._buckets(batch.reqs))
        if self._finished:
            record = self._finished.popleft()
            row[WIDTH] = record.width
            for length, bucket in zip(record.accept_lens, record.buckets or [0] * len(record.accept_lens), strict=True):
                row[COUNTS + bucket * self._widest + length - 1] += 1
        if self._timed:
            record = self._timed.popleft()
            assert record.milliseconds is not None
            nanoseconds = round(record.milliseconds * 1e6)
            row[TIMED:COUNTS] = record.batch_size, record.width, nanoseconds, record.caught_up
        return torch.tensor(row)

    def gathered(self, rows: Tensor) -> None:
        """Receive the columns of all ranks, [ranks, columns].

        Raises:
            DFlashError: the policies of two ranks differ; every rank raises it, before a step is launched.
        """
        states = rows[:, FINGERPRINT].tolist()
        if len(set(states)) > 1:
            raise DFlashError(
                f"the width policies of {len(states)} ranks differ under DP attention (states {states})",
                expected="the same state on every rank, from which each chooses the next width",
                remedy="report it with the log; until then leave --speculative-adaptive out",
            )
        self._news = rows
        most = rows.amax(0)
        self.load = Load(int(most[REQUESTS]), int(most[CONTEXT]), rows[:, MATCHES].sum(0).tolist())

    def _learn(self) -> None:
        if (rows := self._news) is None:
            return
        for width in sorted({*rows[:, WIDTH].tolist()} - {0}):
            counts = rows[rows[:, WIDTH] == width, COUNTS:].sum(0).tolist()
            found = [divmod(cell, self._widest) for cell, count in enumerate(counts) for _ in range(count)]
            self._policy.observe(width, [last + 1 for _, last in found], [bucket for bucket, _ in found])
        # the ranks wait for each other, so their times are one measurement
        for requests, width, time, bound in rows[rows[:, TIMED] > 0, TIMED:COUNTS].tolist()[:1]:
            self._policy.observe_time(requests, width, time / 1e6, at_most=bool(bound))
        self._news = None


_rounds: Rounds | None = None
_batch: Any = None


def join(rounds: Rounds | None) -> None:
    """Set the rounds of this process, or None."""
    global _rounds
    _rounds = rounds


def note_batch(local_batch: Any, *_: Any, **__: Any) -> None:
    """Hook before ``prepare_mlp_sync_batch_raw``: note the batch that this rank is about to run."""
    global _batch
    _batch = local_batch


def gather(original: Callable[..., None], info: Any, *args: Any, **kwargs: Any) -> None:
    """Hook around ``MLPSyncBatchInfo.all_gather``: append our columns, and receive all rows."""
    if _rounds is None:
        return original(info, *args, **kwargs)
    columns = _rounds.row(_batch)
    absent = torch.zeros_like(columns)
    absent[FINGERPRINT] = columns[FINGERPRINT]
    info._get_local_tensor = _with(info._get_local_tensor, columns)
    info._get_fallback_tensor = _with(info._get_fallback_tensor, absent)
    original(info, *args, **kwargs)
    _rounds.gathered(info.tp0_info_cpu[:, -len(columns) :])


def _with(row: Callable[..., Tensor], columns: Tensor) -> Callable[..., Tensor]:
    return lambda **options: torch.cat((found := row(**options), columns.to(found.device)))
