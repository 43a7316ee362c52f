"""The drafter's attention through its rings, on SGLang's own pools, layers and batches, against a loop."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash.cpu.layers.attention_backend import TorchAttentionBackend
from sglang_dflash.cpu.layers.kv import CpuKVPool
from sglang_dflash.window.rings import DraftRings
from sglang_dflash.window.size import DraftWindow
from sglang_dflash.worker.step import BlockKV
from tests.support.attention import loop_attention, rule

pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 16, 0.3
BLOCK, WINDOW, SLIDING, CONTEXT = 8, 24, 10, 200


class Drafting:
    """Requests whose context K/V are injected into rings, and steps that attend through them."""

    def __init__(self, lens: list[int], page: int) -> None:
        torch.manual_seed(0)
        self.lens, self.page = torch.tensor(lens), page
        requests = ReqToTokenPool(len(lens), CONTEXT, "cpu", False)
        self.rings = DraftRings(requests, DraftWindow(WINDOW, BLOCK, page), CONTEXT)
        self.rows = torch.tensor(requests.alloc_rows(len(lens)))
        pool = {"dtype": torch.float32, "head_num": KV_HEADS, "head_dim": DIM, "device": "cpu"}
        self.pool = CpuKVPool(self.rings.slots, page_size=page, layer_num=2, enable_memory_saver=False, **pool)
        runner: Any = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.rings.request_pool,
            token_to_kv_pool=self.pool,
            kv_index_translator=None,
            model_config=SimpleNamespace(context_len=CONTEXT),
        )
        self.backend = TorchAttentionBackend(runner)
        self.layers = [
            RadixAttention(HEADS, DIM, SCALE, KV_HEADS, 0, attn_type=AttentionType.ENCODER_ONLY),
            RadixAttention(HEADS, DIM, SCALE, KV_HEADS, 1, sliding_window_size=SLIDING),
        ]
        self.k, self.v = (torch.randn(len(lens), CONTEXT, KV_HEADS, DIM) for _ in range(2))

    def prefill(self) -> None:
        """The whole prompts, in one batch."""
        lens = self.lens.tolist()
        batch = SimpleNamespace(
            reqs=[SimpleNamespace(rid=str(row)) for row in self.rows.tolist()],
            req_pool_indices_cpu=self.rows,
            prefix_lens=[0] * len(lens),
            extend_lens=lens,
            seq_lens=self.lens,
        )
        kept = self.rings.prefill(batch)
        k, v = (torch.cat([kv[i, :n] for i, n in enumerate(lens)])[kept.tokens] for kv in (self.k, self.v))
        self.inject(kept.slots, k, v)

    def inject(self, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        for one in self.layers:
            self.pool.set_kv_buffer(one, slots, k, v)

    def step(self, accepted: list[int]) -> None:
        """Attend from a block, compare with the loop, and inject the context of the block's positions."""
        positions = self.lens[:, None] + torch.arange(BLOCK)
        host_lens = self.lens + BLOCK
        kv = BlockKV(BLOCK, self.lens, torch.empty(0), host_lens, int(host_lens.sum()), exact=True)
        requests: Any = SimpleNamespace(req_pool_indices=self.rows, req_pool_indices_cpu=self.rows)
        seen = self.rings.view(kv, positions.flatten(), requests, SimpleNamespace(plan=SimpleNamespace))
        tokens = positions.numel()
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=len(accepted),
            input_ids=torch.zeros(tokens, dtype=torch.int64),
            req_pool_indices=self.rows,
            seq_lens=seen.seq_lens,
            out_cache_loc=seen.slots,
            seq_lens_sum=0,
        )
        q = torch.randn(tokens, HEADS, DIM)
        k, v = torch.randn(tokens, KV_HEADS, DIM), torch.randn(tokens, KV_HEADS, DIM)
        self.backend.init_forward_metadata(batch)
        outs = [self.backend.forward(q.view(tokens, -1), k, v, one, batch) for one in self.layers]
        for i, length in enumerate(self.lens.tolist()):
            own = slice(i * BLOCK, (i + 1) * BLOCK)
            keys, values = (torch.cat((kv[i, :length], new[own])) for kv, new in ((self.k, k), (self.v, v)))
            oldest = max(0, (length - WINDOW) // self.page * self.page)
            queries, ends = range(length, length + BLOCK), range(length + BLOCK)
            full = [[c >= oldest for c in ends] for _ in queries]
            sliding = [[rule(p, c, causal=True, window=SLIDING) for c in ends] for p in queries]
            for out, allowed in zip(outs, (full, sliding), strict=True):
                want = loop_attention(q[own], keys, values, allowed, SCALE)
                torch.testing.assert_close(out.view(-1, HEADS, DIM)[own].double(), want, atol=1e-5, rtol=1e-5)
        contexts = [
            torch.cat([kv[i, n : n + BLOCK] for i, n in enumerate(self.lens.tolist())]) for kv in (self.k, self.v)
        ]
        self.inject(seen.slots, *contexts)
        self.lens = self.lens + torch.tensor(accepted)


@pytest.mark.parametrize("page", [1, 16])
def test_full_layers_see_the_window_and_sliding_layers_their_own(page: int) -> None:
    drafting = Drafting([50, 7, 33], page)
    drafting.prefill()
    for accepted in ([1, 8, 3], [8, 8, 1], [2, 5, 8], [8, 8, 8], [8, 8, 1], [1, 1, 1]):  # the rings wrap
        drafting.step(accepted)
