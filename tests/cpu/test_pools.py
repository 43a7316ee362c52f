"""KV slots, the K/V pool, and tracking and committing recurrent states, against copies made slot by slot."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_dflash_cpu.layers import pools
from sglang_dflash_cpu.layers.pools import CpuKVPool
from tests.cpu.test_attention_backend import DIM as HEAD_DIM
from tests.cpu.test_attention_backend import KV_HEADS, POOL, layer
from tests.cpu.test_attention_backend import SLOTS as KV_SLOTS


def test_only_the_accepted_prefix_of_a_block_is_written() -> None:
    pool = CpuKVPool(KV_SLOTS, layer_num=1, **POOL)
    slots = torch.tensor([[5, 9, 7], [40, 41, 42], [11, 13, 12]])
    k, v = torch.randn(9, KV_HEADS, HEAD_DIM), torch.randn(9, KV_HEADS, HEAD_DIM)
    pool.set_kv_buffer_prefix_valid(layer(0), slots, torch.tensor([3, 0, 1]), k, v)
    keys, values = pool.get_kv_buffer(0)
    written = [5, 9, 7, 11]
    assert torch.equal(keys[written], k[[0, 1, 2, 6]])
    assert torch.equal(values[written], v[[0, 1, 2, 6]])
    untouched = [slot for slot in range(1, KV_SLOTS) if slot not in written]
    assert not keys[untouched].any()
    assert not values[untouched].any()


def test_moving_slots() -> None:
    pool = CpuKVPool(KV_SLOTS, layer_num=2, enable_kv_cache_copy=True, **POOL)
    k, v = torch.randn(3, KV_HEADS, HEAD_DIM), torch.randn(3, KV_HEADS, HEAD_DIM)
    pool.set_kv_buffer(layer(1), KVWriteLoc(torch.tensor([4, 5, 6])), k, v)
    pool.move_kv_cache(torch.tensor([5, 4]), torch.tensor([4, 6]))
    keys, values = pool.get_kv_buffer(1)
    assert torch.equal(keys[[5, 4]], k[[0, 2]])
    assert torch.equal(values[[5, 4]], v[[0, 2]])


LAYERS, SLOTS, BLOCK, DIM, WIDTH = 3, 12, 5, 10, 4


def state_pools() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    conv = torch.randn(LAYERS, SLOTS, DIM, WIDTH - 1, generator=generator)
    return conv, torch.randn(LAYERS, SLOTS, 2, 3, 5, generator=generator)


def caches(bs: int) -> SimpleNamespace:
    """The tensors of SGLang's speculative state pool for ``bs`` requests and a padding row."""
    conv, ssm = state_pools()
    columns = torch.randn(LAYERS, bs + 1, DIM, BLOCK + WIDTH - 2)
    windows = columns.unfold(-1, WIDTH - 1, 1).transpose(2, 3)  # steps share memory, as for any chain
    intermediate = torch.randn(LAYERS, bs + 1, BLOCK, *ssm.shape[2:])
    return SimpleNamespace(conv=[conv], temporal=ssm, intermediate_ssm=intermediate, intermediate_conv_window=[windows])


@pytest.mark.parametrize("mask", [[True, False, True, True], [False] * 4])
def test_track_copies_the_masked_requests_in_all_layers(mask: list[bool]) -> None:
    conv, ssm = state_pools()
    source, target = torch.tensor([1, 2, 3, 4], dtype=torch.int32), torch.tensor([5, 6, 7, 8])
    expected = [pool.clone() for pool in (conv, ssm)]
    for pool in expected:
        for i, wanted in enumerate(mask):
            if wanted:
                pool[:, target[i]] = pool[:, source[i]]
    pools.track(conv, ssm, source, torch.tensor(mask), target, 4)
    assert torch.equal(conv, expected[0]) and torch.equal(ssm, expected[1])


def test_track_ignores_rows_past_the_batch_and_freed_slots() -> None:
    conv, ssm = state_pools()
    before = conv.clone(), ssm.clone()
    source, target = torch.tensor([-1, 2, 3]), torch.tensor([5, -1, 7])
    pools.track(conv, ssm, source[1:], torch.tensor([True, True]), target[1:], 1, check_freed_slots=True)
    assert torch.equal(conv[:, 1:], before[0][:, 1:]) and torch.equal(ssm[:, 1:], before[1][:, 1:])


@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("rows", [None, [2, 0, 3, 1]])
def test_commit_takes_the_state_of_the_last_accepted_token(tracking: bool, rows: list[int] | None) -> None:
    cache = caches(bs=4)
    slots, last = torch.tensor([3, 5, 7, 9], dtype=torch.int32), torch.tensor([0, 4, -1, 2])
    track_slots, track_steps = torch.tensor([4, 6, 8, 10]), torch.tensor([-1, 1, -1, 2])
    source = rows or [0, 1, 2, 3]
    ssm, conv, windows = cache.temporal.clone(), cache.conv[0].clone(), cache.intermediate_conv_window[0]
    wanted = [(slots, last), (track_slots, track_steps)] if tracking else [(slots, last)]
    for i, row in enumerate(source):
        for to, positions in wanted:
            if positions[i] >= 0:
                ssm[:, to[i]] = cache.intermediate_ssm[:, row, positions[i]]
                conv[:, to[i]] = windows[:, row, positions[i]]
    tracked = (track_slots, track_steps) if tracking else (None, None)
    pools.commit(cache, slots, last, *tracked, src_indices_raw=None if rows is None else torch.tensor(rows))
    # No request reads slot 0: it receives what is not wanted.
    torch.testing.assert_close(cache.temporal[:, 1:], ssm[:, 1:])
    assert torch.equal(cache.conv[0][:, 1:], conv[:, 1:])


def test_commit_leaves_real_slots_alone_for_padding() -> None:
    cache = caches(bs=2)
    before = cache.temporal.clone(), cache.conv[0].clone()
    pools.commit(cache, torch.tensor([-1, 0]), torch.tensor([2, 1]), None, None)
    assert torch.equal(cache.temporal[:, 1:], before[0][:, 1:])
    assert torch.equal(cache.conv[0][:, 1:], before[1][:, 1:])
