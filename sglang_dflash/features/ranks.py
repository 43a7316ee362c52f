"""DP attention: ranks that serve different requests run every step together, with blocks of one width.

Before a step SGLang gathers a row of integers from every rank (``MLPSyncBatchInfo``). This package appends columns to
the row, so all policies receive equal calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.errors import DFlashError
from sglang_dflash.features.step_width import Buckets, Load, Width
from sglang_dflash.launch.plan import current
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.policy import BUCKETS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.step.flight import Finished, Timed


@dataclass
class RankRow:
    """Columns that a rank sends before a step: its load, and one finished and one timed step since the last row.

    ``blocks``: the finished step's requests by bucket and accept length; ``timed``: requests, width, nanoseconds, and
    whether that is an upper bound; zeros without a step.
    """

    state_hash: int  # :meth:`WidthPolicy.state_hash`
    load: Load
    width: int
    timed: Sequence[int]
    blocks: Sequence[int]

    def pack(self) -> list[int]:
        requests, matches = self.load
        return [self.state_hash, requests, *matches, self.width, *self.timed, *self.blocks]

    @classmethod
    def unpack(cls, row: Sequence[int]) -> RankRow:
        state_hash, requests, *rest = row
        matches, (width, *timed), blocks = rest[:BUCKETS], rest[BUCKETS : BUCKETS + 5], rest[BUCKETS + 5 :]
        return cls(state_hash, Load(requests, matches), width, timed, blocks)


class SharedWidth(Width):
    """The width of the steps that all ranks run together. Policies are equal on all ranks.

    A width is picked for the largest batch, to which SGLang pads the others, and for the matches of all requests.
    """

    def __init__(self, policy: WidthPolicy, buckets: Buckets) -> None:
        super().__init__(policy, buckets)
        self._widest = policy.widths[-1]
        self._finished: deque[Finished] = deque()
        self._timed: deque[Timed] = deque()
        self._rows: list[RankRow] = []  # rows of all ranks, which the policy has not observed
        self.batch: ScheduleBatch | None = None  # the next batch of this rank
        self.columns = torch.empty(0)  # columns of this rank in the last gather
        self.load = Load.of(None, ())

    def load_of(self, batch: ScheduleBatch, buckets: Sequence[int]) -> Load:
        return self.load

    def read(self, finished: Finished, collected: Any) -> None:
        """The policies of all ranks receive the step at the next gather."""
        self._finished.append(finished)
        self._timed.extend(finished.timed)

    def gather(self) -> Tensor:
        """Return this rank's ``columns``, int64 on the host, before it runs ``batch``."""
        self._learn()  # before a width is picked
        batch, load, blocks = self.batch, Load.of(None, ()), [0] * (BUCKETS * self._widest)
        width, timed = 0, (0, 0, 0, 0)
        if batch is not None and batch.forward_mode.is_decode():
            load = Load.of(batch, self.buckets(batch.reqs))
        if self._finished:
            step = self._finished.popleft()
            width = step.width
            for length, bucket in zip(step.accept_lens, step.buckets or [0] * len(step.accept_lens), strict=True):
                blocks[bucket * self._widest + length - 1] += 1
        if self._timed:
            its = self._timed.popleft()
            timed = its.batch_size, its.width, round(its.milliseconds * 1e6), its.caught_up
        self.columns = torch.tensor(RankRow(self.policy.state_hash(), load, width, timed, blocks).pack())
        return self.columns

    def absent(self) -> Tensor:
        """Return the columns of a rank that sent none."""
        state_hash, *others = self.columns.tolist()
        return torch.tensor([state_hash, *[0] * len(others)])

    def gathered(self, rows: Tensor) -> None:
        """Receive the columns of all ranks, [ranks, columns].

        Raises:
            DFlashError: the policies of two ranks differ; every rank raises it, before a step is launched.
        """
        self._rows = [RankRow.unpack(row) for row in rows.tolist()]
        states = [row.state_hash for row in self._rows]
        if len(set(states)) > 1:
            raise DFlashError(
                f"the width policies of {len(states)} ranks differ under DP attention (states {states})",
                remedy="report it with the log; until then leave --speculative-adaptive out",
            )
        requests, matches = zip(*(row.load for row in self._rows), strict=True)
        self.load = Load(max(requests), [sum(each) for each in zip(*matches, strict=True)])

    def _learn(self) -> None:
        rows, self._rows = self._rows, []
        for width in sorted({each.width for each in rows} - {0}):
            counts = (sum(each) for each in zip(*(each.blocks for each in rows if each.width == width), strict=True))
            found = [divmod(cell, self._widest) for cell, count in enumerate(counts) for _ in range(count)]
            self.policy.observe(width, [last + 1 for _, last in found], [bucket for bucket, _ in found])
        # the ranks run in step, so their times are one measurement
        for requests, width, time, bound in [each.timed for each in rows if any(each.timed)][:1]:
            self.policy.observe_time(requests, width, time / 1e6, at_most=bool(bound))


def _shared_width() -> SharedWidth:
    width = current.worker.width
    assert isinstance(width, SharedWidth)
    return width


def note_batch(local_batch: Any, *_: Any, **__: Any) -> None:
    """Hook before ``prepare_mlp_sync_batch_raw``: store the next batch of this rank."""
    _shared_width().batch = local_batch


def append_columns(row: Tensor, *_: Any, **__: Any) -> Tensor:
    """Hook after ``MLPSyncBatchInfo._get_local_tensor``: append this rank's columns."""
    return torch.cat((row, _shared_width().gather().to(row.device)))


def append_absent(row: Tensor, *_: Any, **__: Any) -> Tensor:
    """Hook after ``MLPSyncBatchInfo._get_fallback_tensor``: append the columns of a rank without a batch."""
    return torch.cat((row, _shared_width().absent().to(row.device)))


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
