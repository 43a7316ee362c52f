"""Disaggregation: requests that another server prefilled, and backups of retracted requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import append_state_component
from torch import Tensor

from sglang_dflash.launch.plan import current
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.features.window import DraftRings


def start_transferred(batch: ScheduleBatch | None, scheduler: Any, *_: Any) -> None:
    """Hook after ``SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch``: start transferred requests."""
    if batch is not None:
        scheduler.draft_worker.start_transferred(batch)


def describe_rings(_: None, kv_args: Any, *_args: Any, **_kwargs: Any) -> None:
    """Hook after ``setup_state_kv_args``: add the rings to the memory that a disaggregated pair transfers."""
    rings, drafter = current.worker.rings, current.worker.drafter
    assert rings is not None and drafter is not None
    pool = drafter.token_to_kv_pool
    pointers, lengths, page_bytes = pool.get_contiguous_buf_infos()
    ring_bytes = [size // pool.page_size * rings.size for size in page_bytes]
    # with an id per buffer, SGLang rejects rings of another size
    ids = list(range(len(pointers)))
    append_state_component(kv_args, StateType.REQUEST_ROW, pointers, lengths, ring_bytes, layer_ids=ids)


def back_up_drafter(allocator: Any, pool: Any, rings: DraftRings | None) -> None:
    """Make the target's ``allocator``, which backs up a retracted request's K/V on the host, back up the drafter's too.

    Otherwise a resumed request would read another request's drafter K/V.
    """
    copy_targets, load_targets = allocator.get_cpu_copy, allocator.load_cpu_copy

    def slots(indices: Tensor, row: Any) -> Tensor:
        return indices if rings is None else rings.slots_of(int(row))

    def get_cpu_copy(indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> tuple[Any, Any]:
        target = copy_targets(indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        return target, pool.get_cpu_copy(slots(indices, req_pool_index))

    def load_cpu_copy(
        copies: tuple[Any, Any], indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None
    ) -> None:
        load_targets(copies[0], indices, mamba_indices=mamba_indices, req_pool_index=req_pool_index)
        pool.load_cpu_copy(copies[1], slots(indices, req_pool_index))
        if rings is not None:
            rings.restored.add(int(req_pool_index))

    allocator.get_cpu_copy, allocator.load_cpu_copy = get_cpu_copy, load_cpu_copy


_DECODING = "disaggregation.decode.SchedulerDisaggregationDecodeMixin"
HOOKS = Hooks(after={f"{_DECODING}.get_new_prebuilt_batch": start_transferred})
RING_HOOKS = Hooks(after={"disaggregation.utils.setup_state_kv_args": describe_rings})
