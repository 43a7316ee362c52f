"""DP attention: ranks that serve different requests run every step together, with blocks of one width.

Before a step SGLang gathers a row of integers from every rank (``MLPSyncBatchInfo``). Our columns extend that row, so
all policies receive the same calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.features.width import Buckets, Load, Width
from sglang_dflash.launch.plan import current
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.policy import BUCKETS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.step.flight import Finished, Timed

# Columns: the policy's state; the load; a finished step's width; a timed step (requests, width, nanoseconds, upper
# bound or not); the finished step's requests by bucket and accept length.
FINGERPRINT, REQUESTS, CONTEXT, MATCHES, WIDTH, TIMED = 0, 1, 2, slice(3, 3 + BUCKETS), 3 + BUCKETS, 4 + BUCKETS
COUNTS = TIMED + 4


class SharedWidth(Width):
    """The width of the steps that all ranks run together. Policies are equal on all ranks.

    A width is chosen for the largest batch and context, to which other ranks are padded, and for the matches of all
    requests.
    """

    def __init__(self, policy: WidthPolicy, buckets: Buckets) -> None:
        super().__init__(policy, buckets)
        self._widest = policy.widths[-1]
        self._finished: deque[Finished] = deque()
        self._timed: deque[Timed] = deque()
        self._news: Tensor | None = None  # not yet received by the policy
        self.batch: ScheduleBatch | None = None  # that this rank is about to run
        self.columns = torch.empty(0)  # of this rank in the last gather
        self.load = Load.of(None, ())

    def load_of(self, batch: ScheduleBatch, buckets: Sequence[int]) -> Load:
        return self.load

    def read(self, finished: Finished, kept: Any) -> None:
        """The policies of all ranks receive the step at the next gather."""
        self._finished.append(finished)
        self._timed.extend(finished.timed)

    def gather(self) -> Tensor:
        """Return this rank's ``columns``, int64 on the host, before it runs ``batch``."""
        self._learn()  # before every choice of a width
        batch = self.batch
        row = [0] * (COUNTS + BUCKETS * self._widest)
        row[FINGERPRINT] = self.policy.fingerprint()
        if batch is not None and batch.forward_mode.is_decode():
            row[REQUESTS], row[CONTEXT], row[MATCHES] = Load.of(batch, self.buckets(batch.reqs))
        if self._finished:
            step = self._finished.popleft()
            row[WIDTH] = step.width
            for length, bucket in zip(step.accept_lens, step.buckets or [0] * len(step.accept_lens), strict=True):
                row[COUNTS + bucket * self._widest + length - 1] += 1
        if self._timed:
            timed = self._timed.popleft()
            row[TIMED:COUNTS] = timed.batch_size, timed.width, round(timed.milliseconds * 1e6), timed.caught_up
        self.columns = torch.tensor(row)
        return self.columns

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
            self.policy.observe(width, [last + 1 for _, last in found], [bucket for bucket, _ in found])
        # the ranks wait for each other, so their times are one measurement
        for requests, width, time, bound in rows[rows[:, TIMED] > 0, TIMED:COUNTS].tolist()[:1]:
            self.policy.observe_time(requests, width, time / 1e6, at_most=bool(bound))
        self._news = None


def _shared_width() -> SharedWidth:
    width = current.worker.width
    assert isinstance(width, SharedWidth)
    return width


def note_batch(local_batch: Any, *_: Any, **__: Any) -> None:
    """Hook before ``prepare_mlp_sync_batch_raw``: this rank is about to run ``local_batch``."""
    _shared_width().batch = local_batch


def append_columns(row: Tensor, *_: Any, **__: Any) -> Tensor:
    """Hook after ``MLPSyncBatchInfo._get_local_tensor``: append this rank's columns."""
    return torch.cat((row, _shared_width().gather().to(row.device)))


def append_absent(row: Tensor, *_: Any, **__: Any) -> Tensor:
    """Hook after ``MLPSyncBatchInfo._get_fallback_tensor``: append the columns of a rank without a batch."""
    columns = _shared_width().columns
    absent = torch.zeros_like(columns)
    absent[FINGERPRINT] = columns[FINGERPRINT]
    return torch.cat((row, absent.to(row.device)))


def receive(_: None, info: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after ``MLPSyncBatchInfo.all_gather``: receive the columns of all ranks."""
    width = _shared_width()
    width.gathered(info.tp0_info_cpu[:, -len(width.columns) :])


_GATHER = "managers.scheduler_components.dp_attn"
HOOKS = Hooks(
    before={f"{_GATHER}.prepare_mlp_sync_batch_raw": note_batch},
    after={
        f"{_GATHER}.MLPSyncBatchInfo._get_local_tensor": append_columns,
        f"{_GATHER}.MLPSyncBatchInfo._get_fallback_tensor": append_absent,
        f"{_GATHER}.MLPSyncBatchInfo.all_gather": receive,
    },
)
