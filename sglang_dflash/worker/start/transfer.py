"""The drafter's K/V between two disaggregated servers, and of a retracted request.

Without a draft window one slot number serves both pools, so SGLang moves the drafter's K/V too. A ring lies at its
request's row instead and travels as a whole, as SGLang's state of a request row: position ``p`` is found at ``p mod
size`` on the other side too.
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
    """Set up a server of a disaggregated pair; nothing for any other.

    Args:
        role: SGLang's ``--disaggregation-mode``.
        allocator: the target's; pool: the drafter's.
        rings: the drafter's slots under a draft window.
    """
    if role == "decode":
        HostBackup(allocator, pool, rings)
    if role != "null" and rings is not None:
        register_rings(rings, pool)


def register_rings(rings: DraftRings, pool: Any) -> None:
    """Note this process's rings, in the drafter's ``pool``."""
    global _rings
    _rings = rings, pool


def start_transferred(batch: ScheduleBatch | None, scheduler: Any, *_: Any) -> None:
    """Hook after ``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``: requests whose K/V have arrived."""
    if batch is not None and serving.plan is not None:
        scheduler.draft_worker.start_transferred(batch)


def describe_rings(_: None, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after ``setup_state_kv_args``: add the rings, if any, to the description of the memory to transfer."""
    if _rings is None:
        return
    rings, pool = _rings
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    ring_bytes = [size // pool.page_size * rings.size for size in page_bytes]
    # With numbers of its own for each buffer, SGLang compares both sides' sizes and refuses other rings by name.
    numbers = list(range(len(pointers)))
    append_state_component(kv_args, StateType.REQUEST_ROW, pointers, lengths, ring_bytes, layer_ids=numbers)


class HostBackup:
    """Keeps a retracted request's drafter K/V on the host, beside the target's.

    Where SGLang's decoding server copies tensors (hybrid targets), it keeps the target's alone: the request would come
    back to slots that hold another's.

    Args:
        allocator: the target's; SGLang calls its ``get_cpu_copy`` when a request leaves and its ``load_cpu_copy`` when
            it returns.
        pool: the drafter's.
        rings: the drafter's slots under a draft window.
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
