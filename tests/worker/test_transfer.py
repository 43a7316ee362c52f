"""What a disaggregated server moves of the drafter's K/V, on real pools."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang_dflash.plan.serving import DraftWindow
from sglang_dflash.upstream import ReqToTokenPool, StateType
from sglang_dflash.worker import window
from sglang_dflash.worker.window import DraftRings, describe_rings, prepare_transfer
from sglang_dflash_cpu.layers.pools import CpuKVPool
from tests.support.configs import serve, serve_builtin

pytestmark = pytest.mark.sglang

CONTEXT, REQUESTS, LAYERS, HEADS, DIM = 200, 3, 2, 2, 4


def pool_of(slots: int, page: int) -> CpuKVPool:
    """A drafter's pool in which every number is another one."""
    pool = CpuKVPool(
        slots,
        page_size=page,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
    for number, buffer in enumerate((*pool.k_buffer, *pool.v_buffer)):
        buffer.copy_(torch.arange(buffer.numel()).view_as(buffer) + 0.01 * number)
    return pool


def rings_of(page: int, *, by_row: bool = True) -> DraftRings:
    request_pool = ReqToTokenPool(REQUESTS, CONTEXT + 20, "cpu", False)
    return DraftRings(request_pool, DraftWindow(24, block=8, page=page), CONTEXT, by_row=by_row)


@pytest.fixture(autouse=True)
def no_rings() -> Iterator[None]:
    yield
    window._transferred = None


def new_args() -> Any:
    """As much of SGLang's ``KVArgs`` as a state component fills."""
    names = ("types", "data_ptrs", "data_lens", "item_lens", "dim_per_tensor", "conv_shard_groups")
    return SimpleNamespace(**{f"state_{name}": [] for name in (*names, "slice_outer_counts", "layer_ids")})


@pytest.mark.parametrize("page", [1, 16])
def test_an_item_of_a_row_is_its_ring(page: int) -> None:
    """Read as the transfer reads: item ``r`` of a buffer begins at ``r`` times its bytes."""
    rings, args = rings_of(page), new_args()
    pool = pool_of(rings.slots, page)
    prepare_transfer("prefill", None, pool, rings)
    describe_rings(None, args)
    assert args.state_types == [StateType.REQUEST_ROW]
    buffers = [*pool.k_buffer, *pool.v_buffer]
    assert args.state_layer_ids == [list(range(len(buffers)))]
    [pointers], [lengths], [items] = args.state_data_ptrs, args.state_data_lens, args.state_item_lens
    for pointer, length, item, buffer in zip(pointers, lengths, items, buffers, strict=True):
        for row in range(1, REQUESTS + 1):
            assert (row + 1) * item <= length
            sent = torch.frombuffer(bytearray(ctypes.string_at(pointer + row * item, item)), dtype=torch.float32)
            assert torch.equal(sent, buffer[rings.slots_of(row)].flatten())


class Allocator:
    """The target's: keeps the slots it was asked for, as SGLang's keeps the target's K/V."""

    def get_cpu_copy(self, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> str:
        return f"target's K/V of {indices.tolist()}"

    def load_cpu_copy(self, copy: str, indices: Tensor, mamba_indices: Any = None, req_pool_index: Any = None) -> None:
        self.loaded = copy


def test_a_retracted_request_returns_with_the_drafters_context() -> None:
    pool, allocator = pool_of(64, 1), Allocator()
    prepare_transfer("decode", allocator, pool, None)
    left, back = torch.tensor([3, 4, 9]), torch.tensor([20, 30, 40])
    before = [buffer[left].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    kept: Any = allocator.get_cpu_copy(left, mamba_indices=None, req_pool_index=1)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[left] = -1  # another request's by now
    allocator.load_cpu_copy(kept, back, mamba_indices=None, req_pool_index=2)
    assert allocator.loaded == "target's K/V of [3, 4, 9]"
    for buffer, expected in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        assert torch.equal(buffer[back], expected)


def prebuilt(row: int, length: int, *, retracted: bool) -> Any:
    return SimpleNamespace(
        reqs=[SimpleNamespace(rid="r", retracted_stain=retracted)],
        req_pool_indices=torch.tensor([row]),
        req_pool_indices_cpu=torch.tensor([row]),
        seq_lens_cpu=torch.tensor([length]),
    )


def test_a_retracted_request_returns_with_its_ring_under_another_row() -> None:
    rings, allocator = rings_of(1), Allocator()
    pool = pool_of(rings.slots, 1)
    prepare_transfer("decode", allocator, pool, rings)
    before = [buffer[rings.slots_of(1)].clone() for buffer in (*pool.k_buffer, *pool.v_buffer)]
    kept: Any = allocator.get_cpu_copy(torch.arange(90), req_pool_index=1)
    allocator.load_cpu_copy(kept, torch.arange(90), req_pool_index=3)
    for buffer, expected in zip((*pool.k_buffer, *pool.v_buffer), before, strict=True):
        assert torch.equal(buffer[rings.slots_of(3)], expected)
    rings.transferred(prebuilt(3, 90, retracted=True))
    assert rings._oldest[3] == rings._oldest_cpu[3] == 90 - 24


@pytest.mark.parametrize(
    ("length", "retracted", "oldest"), [(90, False, 66), (10, False, 0), (90, True, 90)], ids=["", "short", "lost"]
)
def test_how_far_back_a_transferred_ring_reaches(length: int, retracted: bool, oldest: int) -> None:
    """A request that was retracted and whose ring nobody kept begins an empty one."""
    rings = rings_of(1)
    rings.transferred(prebuilt(2, length, retracted=retracted))
    assert rings._oldest[2] == rings._oldest_cpu[2] == oldest


@pytest.mark.parametrize("ours", [False, True])
def test_our_worker_takes_up_what_arrives(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch) if ours else serve_builtin(monkeypatch)
    taken: list[Any] = []
    scheduler = SimpleNamespace(draft_worker=SimpleNamespace(start_transferred=taken.append))
    batch: Any = object()
    window.start_transferred(None, scheduler, None)
    window.start_transferred(batch, scheduler, None)
    assert taken == [batch] * ours
