"""Transfer the drafter's K/V between disaggregated servers, and back up those of a retracted request.

Without a draft window both pools use the same slot numbers, so SGLang transfers the drafter's K/V too. A ring lies at
its request's row and is transferred whole, as SGLang's state of a request row: position ``p`` is at ``p mod size`` on
both servers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.plan import serving
from sglang_dflash.upstream import StateType, append_state_component
from sglang_dflash.worker.window import DraftRings

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch

_rings: tuple[DraftRings, Any] | None = None


def prepare_transfer(role: str, allocator: Any, pool: Any, rings: DraftRings | None) -> None:
    """Set up the transfer on a server of a disaggregated pair; do nothing on others.

    Args:
        role: SGLang's ``--disaggregation-mode``.
        allocator: the target's; pool: the drafter's.
        rings: the drafter's KV slots under a draft window.
    """
    if role == "decode":
        HostBackup(allocator, pool, rings)
    if role != "null" and rings is not None:
        register_rings(rings, pool)


def register_rings(rings: DraftRings, pool: Any) -> None:
    """Register this process's rings in the drafter's ``pool``, for :func:`describe_rings`."""
    global _rings
    _rings = rings, pool


def start_transferred(batch: ScheduleBatch | None, scheduler: Any, *_: Any) -> None:
    """Hook after ``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``: start transferred requests."""
    if batch is not None and serving.plan is not None:
        scheduler.draft_worker.start_transferred(batch)


def describe_rings(_: None, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after ``setup_state_kv_args``: add the rings, if any, to the description of the memory to transfer."""
    if _rings is None:
        return
    rings, pool = _rings
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    ring_bytes = [size // pool.page_size * rings.size for size in page_bytes]
    # With an id per buffer, SGLang compares the sizes on both servers and rejects rings that differ.
    ids = list(range(len(pointers)))
    append_state_component(kv_args, StateType.REQUEST_ROW, pointers, lengths, ring_bytes, layer_ids=ids)


class HostBackup:
    """Backs up a retracted request's drafter K/V on the host, together with the target's.

    SGLang's decoding server backs up only the target's (hybrid targets), so a resumed request would read the drafter's
    K/V of another request.

    Args:
        allocator: the target's; SGLang calls ``get_cpu_copy`` when it retracts a request, ``load_cpu_copy`` when it
            resumes it.
        pool: the drafter's.
        rings: the drafter's KV slots under a draft window.
    """

    def __init__(self, allocator: Any, pool: Any, rings: DraftRings | None) -> None:
        self._copy_target, self._load_target = allocator.get_cpu_copy, allocator.load_cpu_copy
        self._pool, self._rings = pool, rings
        allocator.get_cpu_copy, allocator.load_cpu_copy = self.copy, self.load

    def copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> tuple[Any, Any]:
        target = self._copy_target(indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        return target, self._pool.get_cpu_copy(self._slots(indices, req_pool_index))

    def load(
        self, copies: tuple[Any, Any], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        target, drafter = copies
        self._load_target(target, indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        self._pool.load_cpu_copy(drafter, self._slots(indices, req_pool_index))
        if self._rings is not None:
            self._rings.restored(int(req_pool_index))

    def _slots(self, indices: Tensor, row: Any) -> Tensor:
        if self._rings is None:
            return indices
        ring = self._rings.slots_of(int(row))
        return torch.arange(ring.start, ring.stop, device=indices.device)
