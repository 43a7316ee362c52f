"""The commit of recurrent states, on SGLang's own pool."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from torch import Tensor

from sglang_dflash.ops import accept_block
from sglang_dflash.states import replay
from sglang_dflash.states.reference import Records
from sglang_dflash.worker import commit
from sglang_dflash.worker.commit import RecurrentCommit, may_cross
from sglang_dflash_cpu.layers.pools import commit as commit_steps
from sglang_dflash_cpu.layers.pools import track
from tests.support.configs import serve
from tests.support.gdn_replay import cache_params, decode_with_triton, rings, unexpected

pytestmark = pytest.mark.sglang

LAYERS, H, HV, K, V, WINDOW, RING = 2, 2, 4, 8, 8, 3, 16
ROWS, SLOTS, TRACKS, ANOTHERS = torch.tensor([2, 1]), torch.tensor([3, 1]), torch.tensor([5, 4]), 6
GRID = 64


@dataclass
class Pools:
    """Two requests in rows 2 and 1, with states in slots 3 and 1 and snapshots for 5 and 4."""

    requests: HybridReqToTokenPool

    @property
    def temporal(self) -> Tensor:
        return self.requests.mamba_pool.mamba_cache.temporal

    @property
    def conv(self) -> Tensor:
        return self.requests.mamba_pool.mamba_cache.conv[0]

    def committer(self, *, replays: bool) -> RecurrentCommit:
        target: Any = SimpleNamespace(model_runner=SimpleNamespace(req_to_token_pool=self.requests))
        return RecurrentCommit(target, replays=replays, exact=False)

    def changed(self, before: Tensor) -> set[int]:
        """Slots whose state has changed, without the reserved slot 0."""
        return {slot for slot in range(1, before.shape[1]) if not torch.equal(self.temporal[:, slot], before[:, slot])}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> Pools:
    serve(monkeypatch, replay=True)
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: True)  # as on CUDA and our CPU platform
    monkeypatch.setattr(commit, "scatter_mamba_states_after_mtp_verify", commit_steps)
    monkeypatch.setattr(commit, "track_mamba_states_all_layers", track)
    monkeypatch.setattr(commit, "mamba_track_grid", lambda page: GRID)
    decode_with_triton(monkeypatch)
    requests = HybridReqToTokenPool(
        size=4,
        mamba_size=8,
        mamba_spec_state_size=4,
        max_context_len=8,
        device="cpu",
        enable_memory_saver=False,
        cache_params=cache_params(LAYERS, H, HV, K, V, WINDOW),
        mamba_layer_ids=[0, 1],
        enable_mamba_extra_buffer=True,
        speculative_num_draft_tokens=8,
        linear_replayssm_cache_len=RING,
        enable_linear_replayssm_spec=True,
    )
    torch.manual_seed(0)
    pools = Pools(requests)
    for tensor in (pools.temporal, pools.conv):
        tensor.normal_()
    requests.req_index_to_mamba_index_mapping[ROWS] = SLOTS.to(torch.int32)
    return pools


def a_step(pools: Pools, width: int, accepted: list[int], lens: tuple[int, int] = (62, 100)) -> Any:
    """A block of two requests; with these lengths the first crosses a boundary with its second token."""
    before, tokens = torch.tensor(lens), torch.zeros(2, width, dtype=torch.int64)
    target = (torch.arange(width) >= torch.tensor(accepted)[:, None] - 1).long()
    batch = SimpleNamespace(
        req_pool_indices=ROWS, mamba_track_indices=TRACKS, seq_lens=before, tree_cache=SimpleNamespace(page_size=1)
    )
    return SimpleNamespace(
        batch=batch,
        width=width,
        state=SimpleNamespace(committed_cpu=lens, in_flight=0),
        state_slots=pools.requests.req_index_to_mamba_index_mapping[ROWS],
        accepted=accept_block(tokens, target, before, interval=GRID),
    )


def verify(pools: Pools, width: int) -> None:
    """Write a block's records as SGLang's attention backend does."""
    cache = pools.requests.mamba_pool.mamba_cache
    records, tokens = replay.pool_records(cache), 2 * width
    shapes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": (HV,), "b": (HV,)}
    torch.manual_seed(1)
    for layer in range(LAYERS):
        replay.verify(
            unexpected,
            **{name: torch.randn(tokens, *shape) for name, shape in shapes.items()},
            **rings(Records(*(part[layer] for part in records.parts))),
            A_log=torch.rand(HV),
            dt_bias=torch.rand(HV),
            checkpoint_state=pools.temporal[layer],
            out=torch.empty(tokens, HV, V),
            ssm_state_indices=SLOTS,
            replay_indices=ROWS,
            max_spec_len=width,
            scale=K**-0.5,
        )
    cache.intermediate_conv_window[0].normal_()


@pytest.mark.parametrize("width", [1, 5])
def test_a_row_given_away_after_the_verify_keeps_its_new_owners_state(pools: Pools, width: int) -> None:
    """A decoding server ends a request and fills the row's new slot while the surplus step has yet to commit."""
    step, committer = a_step(pools, width, [min(width, 4), 1], lens=(63, 100)), pools.committer(replays=True)
    committer.before_verify(step)
    if width > 1:
        verify(pools, width)
    pools.requests.req_index_to_mamba_index_mapping[ROWS[0]] = ANOTHERS
    states, windows, old = pools.temporal.clone(), pools.conv.clone(), pools.temporal[:, SLOTS[0]].clone()
    committer.commit(step)
    assert torch.equal(pools.conv[:, ANOTHERS], windows[:, ANOTHERS])
    assert pools.changed(states) == ({5} if width == 1 else {1, 3, 5})
    if width == 1:
        assert torch.equal(pools.temporal[:, 5], old), "the snapshot is the new owner's state"


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
