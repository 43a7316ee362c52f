"""The commit of recurrent states, on SGLang's own pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

from sglang_dflash.ops import accept_block
from sglang_dflash.states import commit
from sglang_dflash.states.commit import RecurrentCommit, may_cross
from sglang_dflash.states.replay import pool_records
from sglang_dflash_cpu.layers.pools import commit as commit_steps
from sglang_dflash_cpu.layers.pools import track

pytestmark = pytest.mark.sglang

# Two requests in rows 2 and 1, with states in slots 3 and 1 and snapshots for 5 and 4.
ROWS, SLOTS, TRACKS, ANOTHERS = torch.tensor([2, 1]), torch.tensor([3, 1]), torch.tensor([5, 4]), 6
GRID = 64


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> HybridReqToTokenPool:
    """With the states and the records of a verify."""
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: True)  # as on CUDA and our CPU platform
    monkeypatch.setattr(commit, "scatter_mamba_states_after_mtp_verify", commit_steps)
    monkeypatch.setattr(commit, "track_mamba_states_all_layers", track)
    monkeypatch.setattr(commit, "get_schedule", lambda: SimpleNamespace(page_size=1))
    monkeypatch.setattr(commit, "mamba_track_grid", lambda page: GRID)
    heads = {"n_groups": 2, "num_heads": 4, "head_dim": 8, "state_size": 8}
    shape = Mamba2StateShape.create(tp_world_size=1, intermediate_size=32, conv_kernel=4, **heads)
    dtypes = Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    pool = HybridReqToTokenPool(
        size=4,
        mamba_size=8,
        mamba_spec_state_size=4,
        max_context_len=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 1], dtype=dtypes),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=8,
        linear_replayssm_cache_len=16,
        enable_linear_replayssm_spec=True,
    )
    cache = pool.mamba_pool.mamba_cache
    for part in (cache.temporal, cache.conv[0], cache.intermediate_conv_window[0], *pool_records(cache).parts):
        part.normal_()
    pool.req_index_to_mamba_index_mapping[ROWS] = SLOTS.int()
    return pool


@pytest.mark.parametrize(("width", "written"), [(1, {5}), (5, {1, 3, 5})])
def test_a_row_given_away_after_the_verify_keeps_its_new_owners_state(
    width: int, written: set[int], pool: HybridReqToTokenPool
) -> None:
    """A decoding server ends a request and fills the row's new slot while the surplus step has yet to commit."""
    target: Any = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=pool))
    committer, lens = RecurrentCommit(target), torch.tensor([63, 100])
    accepted = (torch.arange(width) >= torch.tensor([[min(width, 4)], [1]]) - 1).long()
    step: Any = SimpleNamespace(
        batch=SimpleNamespace(
            req_pool_indices=ROWS, mamba_track_indices=TRACKS, tree_cache=SimpleNamespace(page_size=1)
        ),
        width=width,
        state=SimpleNamespace(committed_cpu=lens.tolist(), in_flight=0),
        state_slots=pool.req_index_to_mamba_index_mapping[ROWS],
        accepted=accept_block(torch.zeros(2, width, dtype=torch.int64), accepted, lens, interval=GRID),
    )
    committer.prepare(step)
    pool.req_index_to_mamba_index_mapping[ROWS[0]] = ANOTHERS
    cache = pool.mamba_pool.mamba_cache
    states, windows = cache.temporal.clone(), cache.conv[0].clone()
    committer.advance(step)
    assert torch.equal(cache.conv[0][:, ANOTHERS], windows[:, ANOTHERS])
    changed = (cache.temporal != states).flatten(2).any(-1).any(0).nonzero().flatten().tolist()
    assert {*changed} - {0} == written
    if width == 1:
        assert torch.equal(cache.temporal[:, 5], states[:, SLOTS[0]]), "the snapshot is the new owner's state"


@given(
    lengths=st.lists(st.integers(1, 2000), min_size=1, max_size=4),
    gained=st.data(),
    growth=st.integers(1, 64),
    interval=st.sampled_from([1, 16, 64, 256]),
)
def test_no_crossing_is_missed(lengths: list[int], gained: st.DataObject, growth: int, interval: int) -> None:
    """Wherever in the growth a step begins and ends."""
    for length in lengths:
        before = length + gained.draw(st.integers(0, growth))
        after = gained.draw(st.integers(before, length + growth))
        if before // interval != after // interval:
            assert may_cross(lengths, growth, interval)
