"""Slots that a decode step reserves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.worker import state
from sglang_dflash.worker.state import DraftState

BLOCK = 4


def steps_that_allocate(widths: list[int], accepted: list[int], page: int) -> int:
    """Decode one request whose lengths reach the host one step late; return how many steps allocated slots."""
    kv = SimpleNamespace(kv_committed_len=10, kv_allocated_len=10)
    pools = {"token_to_kv_pool_allocator": SimpleNamespace(page_size=page), "tree_cache": None, "device": "cpu"}
    table = SimpleNamespace(req_to_token=torch.zeros(2, 1000))
    batch: Any = SimpleNamespace(reqs=[SimpleNamespace(kv=kv, decode_batch_idx=0)], req_to_token_pool=table, **pools)
    batch.batch_size, batch.maybe_evict_swa, batch.req_pool_indices = (lambda: 1), (lambda: None), torch.ones(1)
    allocations = 0

    def allocate(*_: Any, reqs: list[Any], nxt_kv_lens_cpu: torch.Tensor, **__: Any) -> None:
        nonlocal allocations
        allocations += 1
        kv.kv_allocated_len = int(nxt_kv_lens_cpu[0])

    committed, spec_info = 10, DraftState(torch.zeros(1), torch.zeros(1), BLOCK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "alloc_for_spec_decode", allocate)
        patch.setattr(state, "get_alloc_reserve_per_decode", lambda: 2 * BLOCK)
        for width, count in zip(widths, accepted, strict=True):
            spec_info.prepare_for_decode(batch)
            assert spec_info.reserved_tokens == int(spec_info.reserved_lens_cpu.sum()) == kv.kv_allocated_len
            assert kv.kv_allocated_len >= committed + width, "the block has no slots"
            kv.kv_committed_len, committed = committed, committed + min(count, width)
            spec_info = DraftState(torch.zeros(1), torch.zeros(1), width)
    return allocations


@given(
    st.lists(st.tuples(st.integers(1, BLOCK), st.integers(1, BLOCK)), min_size=1, max_size=40), st.sampled_from([1, 8])
)
def test_every_block_has_slots(steps: list[tuple[int, int]], page: int) -> None:
    steps_that_allocate(*map(list, zip(*steps, strict=True)), page)


def test_plain_steps_seldom_allocate() -> None:
    assert steps_that_allocate([1] * 32, [1] * 32, page=1) == 32 // BLOCK
