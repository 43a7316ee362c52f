"""Slots that a decode step reserves."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_dflash.step import draft_state
from sglang_dflash.step.draft_state import DraftState

BLOCK = 4
PROMPT = 10


class OneRequest:
    """A request that decodes in a pool of ``slots``; its lengths reach the host one step late."""

    def __init__(self, page: int, slots: int = 10_000, new_tokens: int = 1_000) -> None:
        self.kv = SimpleNamespace(kv_committed_len=PROMPT, kv_allocated_len=PROMPT)
        self.page, self.free, self.allocations = page, slots - -(-PROMPT // page) * page, 0
        params = SimpleNamespace(max_new_tokens=new_tokens)
        req = SimpleNamespace(kv=self.kv, decode_batch_idx=0, origin_input_ids=[0] * PROMPT, sampling_params=params)
        pool = SimpleNamespace(page_size=page, check_decode_capacity=lambda num_tokens, **_: num_tokens <= self.free)
        table = SimpleNamespace(req_to_token=torch.zeros(2, 12_000))
        self.batch: Any = SimpleNamespace(reqs=[req], req_to_token_pool=table, token_to_kv_pool_allocator=pool)
        self.batch.tree_cache = self.batch.spec_algorithm = None
        self.batch.device, self.batch.enable_overlap = "cpu", True
        self.batch.batch_size, self.batch.maybe_evict_swa = (lambda: 1), (lambda: None)
        self.batch.req_pool_indices = torch.ones(1)
        self.batch.spec_info = DraftState(torch.zeros(1), torch.zeros(1), BLOCK)
        self.committed = PROMPT

    def allocate(self, *_: Any, nxt_kv_lens_cpu: torch.Tensor, **__: Any) -> None:
        now, wanted = self.kv.kv_allocated_len, int(nxt_kv_lens_cpu[0])
        self.allocations, self.kv.kv_allocated_len = self.allocations + 1, wanted
        self.free -= (-(-wanted // self.page) + (-now // self.page)) * self.page
        assert self.free >= 0

    def step(self, width: int, count: int) -> bool:
        """Decode; return whether the request ran, and was not aborted."""
        spec_info = self.batch.spec_info
        if draft_state.tokens_required(None, self.batch, self.batch.reqs, self.page) > self.free:  # type: ignore[arg-type]
            return False
        spec_info.prepare_for_decode(self.batch)
        slots = self.kv.kv_allocated_len if spec_info.slot_limits is None else int(spec_info.slot_limits[0])
        assert slots == self.kv.kv_allocated_len
        end = PROMPT + self.batch.reqs[0].sampling_params.max_new_tokens
        most = width if spec_info.free_positions is None else min(width, spec_info.free_positions)
        assert min(self.committed + most, end) <= slots, "a draft that may be accepted has no slot"
        assert int(spec_info.reserved_lens_cpu[0]) >= self.committed + width, "the bound is no bound"
        self.kv.kv_committed_len, self.committed = self.committed, self.committed + min(count, most)
        self.batch.spec_info = DraftState(torch.zeros(1), torch.zeros(1), width)
        return True


def decode(request: OneRequest, steps: Sequence[tuple[int, int]], end: int = 10_000) -> OneRequest:
    """Decode with these widths and accept lengths until the host knows of ``end``, or the request is aborted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_state, "alloc_for_spec_decode", request.allocate)
        patch.setattr(draft_state, "get_alloc_reserve_per_decode", lambda: 2 * BLOCK)
        for width, count in steps:
            if request.kv.kv_committed_len >= end or not request.step(width, count):
                break
    return request


STEPS = st.lists(st.tuples(st.integers(1, BLOCK), st.integers(1, BLOCK)), min_size=1, max_size=40)


@given(STEPS, st.sampled_from([1, 8]))
def test_every_block_has_slots(steps: list[tuple[int, int]], page: int) -> None:
    decode(OneRequest(page), steps)


@given(STEPS, st.sampled_from([1, 8]), st.integers(1, 40), st.integers(0, 9))
def test_the_last_request_reaches_its_end_in_a_pool_that_just_holds_it(
    steps: list[tuple[int, int]], page: int, new_tokens: int, more: int
) -> None:
    """Plain decoding gets there, one position at a time."""
    end = PROMPT + new_tokens
    request = OneRequest(page, -(-end // page) * page + more, new_tokens)
    decode(request, (steps * 40)[: 2 * new_tokens + 4], end)
    assert request.committed >= end


@given(STEPS, st.sampled_from([1, 8]), st.integers(2 * BLOCK, 40))
def test_a_short_pool_narrows_the_block(steps: list[tuple[int, int]], page: int, slots: int) -> None:
    """A request that may end long before its limit gets every token that the pool holds, less the step in flight."""
    request = decode(OneRequest(page, PROMPT + slots), (steps * 100)[:100])
    assert request.committed >= PROMPT + slots - BLOCK - page


def test_plain_steps_seldom_allocate() -> None:
    assert decode(OneRequest(page=1), [(1, 1)] * 32).allocations == 32 // BLOCK
