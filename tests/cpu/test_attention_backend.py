"""The attention backend with SGLang's own layers, batches and pools, against fp64; the K/V pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend
from sglang_dflash_cpu.layers.attention_math import Contexts, attend_prompt, attend_prompt_rows, attend_rows, row_keys
from sglang_dflash_cpu.layers.pools import CpuKVPool

pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3
SLOTS, PAGE = 256, 1
WINDOW = 6
POOL: dict[str, Any] = {
    **{"page_size": PAGE, "dtype": torch.float32, "head_num": KV_HEADS, "head_dim": DIM},
    **{"device": "cpu", "enable_memory_saver": False},
}


def layer(
    layer_id: int, *, window: int = -1, kind: AttentionType = AttentionType.DECODER, cap: float = 0.0
) -> RadixAttention:
    return RadixAttention(
        HEADS, DIM, SCALE, KV_HEADS, layer_id, logit_cap=cap, sliding_window_size=window, attn_type=kind
    )


def attention(q: Tensor, k: Tensor, v: Tensor, first: int, *, causal: bool, window: int | None) -> Tensor:
    """Queries ``[T, H, D]`` from position ``first`` over keys and values ``[C, G, D]`` from position 0, in fp64."""
    k, v = (each.double().repeat_interleave(HEADS // KV_HEADS, 1) for each in (k, v))
    distance = torch.arange(first, first + len(q))[:, None] - torch.arange(len(k))
    hidden = (distance < 0) & causal
    if window is not None:
        hidden |= distance.abs() > window
    scores = torch.einsum("thd,chd->htc", q.double(), k) * SCALE
    return torch.einsum("htc,chd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


class Requests:
    """Requests with scattered slots, and every key and value that a layer ever wrote for them."""

    def __init__(self, lens: list[int]) -> None:
        self.lens = lens
        self.table = ReqToTokenPool(size=8, max_context_len=64, device="cpu", enable_memory_saver=False)
        self.rows = torch.randperm(8)[: len(lens)]
        shares = (torch.randperm(SLOTS) + 1).split(SLOTS // len(lens))
        for row, slots in zip(self.rows.tolist(), shares, strict=False):
            self.table.req_to_token[row, : min(64, slots.shape[0])] = slots[:64].int()
        self.pool = CpuKVPool(SLOTS, layer_num=2, **POOL)
        for each in (*self.pool.k_buffer, *self.pool.v_buffer):
            each.fill_(torch.nan)  # as memory may hold that was released and resumed
        places = {"req_to_token_pool": self.table, "token_to_kv_pool": self.pool, "kv_index_translator": None}
        self.backend = TorchAttentionBackend(SimpleNamespace(**places))
        self.k = [torch.randn(64, KV_HEADS, DIM) for _ in lens]
        self.v = [torch.randn(64, KV_HEADS, DIM) for _ in lens]

    def slots(self, request: int, start: int, stop: int) -> Tensor:
        return self.table.req_to_token[self.rows[request], start:stop].long()

    def run(
        self, mode: ForwardMode, layers: list[RadixAttention], starts: list[int], stops: list[int]
    ) -> tuple[Tensor, list[Tensor]]:
        """One forward of positions ``starts .. stops - 1``: queries, and the output of every layer."""
        spans = list(zip(range(len(self.lens)), starts, stops, strict=True))
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(self.lens),
            input_ids=torch.zeros(sum(stops) - sum(starts), dtype=torch.int64),
            req_pool_indices=self.rows,
            seq_lens=torch.tensor(starts if mode == ForwardMode.TARGET_VERIFY else stops),
            out_cache_loc=torch.cat([self.slots(i, a, b) for i, a, b in spans]),
            seq_lens_sum=0,
            extend_prefix_lens_cpu=starts,
            extend_seq_lens_cpu=[b - a for a, b in zip(starts, stops, strict=True)],
        )
        q = torch.randn(sum(stops) - sum(starts), HEADS, DIM)
        k = torch.cat([self.k[i][a:b] for i, a, b in spans])
        v = torch.cat([self.v[i][a:b] for i, a, b in spans])
        self.backend.init_forward_metadata(batch)
        return q, [self.backend.forward(q.view(q.shape[0], -1), k, v, one, batch) for one in layers]

    def expect(
        self, q: Tensor, out: Tensor, starts: list[int], stops: list[int], causal: bool, window: int | None
    ) -> None:
        lens = [stop - start for start, stop in zip(starts, stops, strict=True)]
        parts = zip(q.split(lens), out.view(-1, HEADS, DIM).split(lens), self.k, self.v, starts, stops, strict=True)
        for asked, found, k, v, start, stop in parts:
            want = attention(asked, k[:stop], v[:stop], start, causal=causal, window=window)
            torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("lens", [[11], [3, 24, 9]], ids=str)
def test_every_forward_mode_on_full_and_sliding_layers(lens: list[int]) -> None:
    """A prompt in two chunks, a decode, a verification and a drafter's block, each on both layers."""
    torch.manual_seed(len(lens))
    requests = Requests(lens)
    target, drafter = (
        [layer(0, kind=kind), layer(1, window=WINDOW, kind=kind)]
        for kind in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    )
    begin, half = [0] * len(lens), [n // 2 for n in lens]
    one, five, nine = ([n + more for n in lens] for more in (1, 5, 9))
    for mode, layers, starts, stops in (
        (ForwardMode.EXTEND, target, begin, half),
        (ForwardMode.EXTEND, target, half, lens),
        (ForwardMode.DECODE, target, lens, one),
        (ForwardMode.TARGET_VERIFY, target, one, five),
        (ForwardMode.TARGET_VERIFY, drafter, five, nine),
    ):
        q, outs = requests.run(mode, layers, starts, stops)
        for out, window in zip(outs, (None, WINDOW), strict=True):
            requests.expect(q, out, starts, stops, causal=layers is target, window=window)


@pytest.mark.parametrize("window", [None, WINDOW])
def test_a_prompts_rows_are_the_same_bits_however_it_is_split(window: int | None) -> None:
    """As SGLang's deterministic Triton kernel: a prefix from the cache changes nothing."""
    q, k, v = (torch.randn(150, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rule: dict[str, Any] = {"window": window, "scale": SCALE}
    whole = attend_prompt_rows(q, k, v, prefix=0, **rule)
    torch.testing.assert_close(whole, attend_prompt(q, k, v, prefix=0, causal=True, **rule))
    for split in (1, 63, 64, 65, 149):
        first = attend_prompt_rows(q[:split], k[:split], v[:split], prefix=0, **rule)
        assert torch.equal(torch.cat([first, attend_prompt_rows(q[split:], k, v, prefix=split, **rule)]), whole)
    if window is None:  # and those of a decode
        contexts = Contexts(torch.arange(150, dtype=torch.int32)[None], torch.zeros(150).long(), torch.arange(1, 151))
        assert torch.equal(attend_rows(q, k, v, row_keys(contexts, window=None), scale=SCALE), whole)


def test_what_would_be_ignored_is_refused() -> None:
    with pytest.raises(DFlashError, match=r"logit_cap=30"):
        Requests([5]).run(ForwardMode.EXTEND, [layer(0, cap=30.0)], [0], [5])


def test_only_the_accepted_prefix_of_a_block_is_written() -> None:
    pool = CpuKVPool(SLOTS, layer_num=1, **POOL)
    slots = torch.tensor([[5, 9, 7], [40, 41, 42], [11, 13, 12]])
    k, v = torch.randn(9, KV_HEADS, DIM), torch.randn(9, KV_HEADS, DIM)
    pool.set_kv_buffer_prefix_valid(layer(0), slots, torch.tensor([3, 0, 1]), k, v)
    keys, values = pool.get_kv_buffer(0)
    written = [5, 9, 7, 11]
    assert torch.equal(keys[written], k[[0, 1, 2, 6]])
    assert torch.equal(values[written], v[[0, 1, 2, 6]])
    untouched = [slot for slot in range(1, SLOTS) if slot not in written]
    assert not keys[untouched].any()
    assert not values[untouched].any()
