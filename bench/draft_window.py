"""`python bench/draft_window.py`: a draft window's accept length, attention time and memory, without a server.

Accept length comes from the reference decoder, which drafts as the server does; attention time is the CPU time of the
drafter's layers for one block of 8 requests, through the worker's rings and SGLang's pools; bytes are the pools'.
`python -m sglang_dflash.bench.window` measures the same on servers.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

from sglang_dflash.bench.window import conversations
from sglang_dflash.config import DrafterConfig
from sglang_dflash.cpu.attention_backend import TorchAttentionBackend
from sglang_dflash.cpu.kv_pool import CpuKVPool
from sglang_dflash.ops.reference import Block
from sglang_dflash.pairs import drafter_path, target_path
from sglang_dflash.pairs.reference_decoder import ReferenceDecoder
from sglang_dflash.worker.rings import DraftRings
from sglang_dflash.worker.step import Step

PAIR, BLOCK, NEW_TOKENS, PROMPTS = "tiny-hybrid", 16, 48, 3
WINDOWS, CONTEXTS = (None, 16, 64, 512, 2048), (512, 1024, 2048, 4096, 8000)
REQUESTS, BATCH, LONGEST, REPEATS = 32, 8, 8192, 4


class DraftAttention:
    """The drafter's attention layers on a pool of rings, or on one slot per token."""

    def __init__(self, config: DrafterConfig, window: int | None) -> None:
        table = ReqToTokenPool(REQUESTS, LONGEST + BLOCK, "cpu", False)
        self.rings = None if window is None else DraftRings(table, window=window, block=BLOCK, page=1)
        slots = REQUESTS * LONGEST if self.rings is None else self.rings.slots
        self.table = table if self.rings is None else self.rings.request_pool
        own = torch.arange(REQUESTS)[:, None] * LONGEST + torch.arange(LONGEST + BLOCK) % LONGEST + 1
        table.req_to_token[1:] = own.int()
        shape = {"head_num": config.num_kv_heads, "head_dim": config.head_dim, "layer_num": config.num_layers}
        self.pool = CpuKVPool(slots, page_size=1, dtype=torch.float32, device="cpu", enable_memory_saver=False, **shape)
        runner: Any = SimpleNamespace(
            device="cpu",
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            kv_index_translator=None,
            model_config=SimpleNamespace(context_len=LONGEST),
        )
        self.backend, self.config = TorchAttentionBackend(runner), config
        heads = config.num_heads, config.head_dim, config.head_dim**-0.5, config.num_kv_heads
        kind = AttentionType.ENCODER_ONLY
        self.layers = [RadixAttention(*heads, i, attn_type=kind) for i in range(config.num_layers)]

    def seconds(self, context: int) -> float:
        """CPU time of one block, layout of the rings included."""
        rows, lens = torch.arange(1, BATCH + 1), torch.full((BATCH,), context)
        positions = lens[:, None] + torch.arange(BLOCK)
        slots = self.table.req_to_token[rows[:, None], positions % LONGEST].long().flatten()
        start = time.thread_time()
        if self.rings is not None:
            step = Step(BLOCK, lens, Block(positions, positions.flatten(), slots), None, lens + BLOCK, 0)
            seen = self.rings.view(step, rows, SimpleNamespace(plan=SimpleNamespace))
            lens, slots = seen.seq_lens, seen.block.slots
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=BATCH,
            input_ids=torch.zeros(BATCH * BLOCK, dtype=torch.int64),
            req_pool_indices=rows,
            seq_lens=lens,
            out_cache_loc=slots,
            seq_lens_sum=0,
        )
        q = torch.randn(BATCH * BLOCK, self.config.num_heads * self.config.head_dim)
        k = torch.randn(BATCH * BLOCK, self.config.num_kv_heads, self.config.head_dim)
        self.backend.init_forward_metadata(batch)
        for layer in self.layers:
            self.backend.forward(q, k, k, layer, batch)
        return time.thread_time() - start


def main() -> None:
    torch.set_num_threads(1)
    config = DrafterConfig.load(drafter_path(PAIR))
    reference = ReferenceDecoder.load(target_path(PAIR), drafter_path(PAIR))
    prompts = [conversations(PAIR, CONTEXTS, seed) for seed in range(PROMPTS)]
    attention = {window: DraftAttention(config, window) for window in WINDOWS}
    sizes = {window: sum(drafter.pool.get_kv_size_bytes()) / 2**20 for window, drafter in attention.items()}
    print("| window | context | accept length | attention of a block, ms | draft K/V, MiB | of one slot per token |")
    print("|---|---|---|---|---|---|")
    for i, context in enumerate(CONTEXTS):
        for window, drafter in attention.items():
            runs = [reference.decode(prompt[i], NEW_TOKENS, BLOCK, draft_window=window) for prompt in prompts]
            accepted = sum(sum(run.accept_lengths) for run in runs) / sum(len(run.steps) for run in runs)
            milliseconds = 1000 * min(drafter.seconds(context) for _ in range(REPEATS))
            share = sizes[window] / sizes[None]
            print(f"| {window or 'none'} | {context} | {accepted:.2f} | {milliseconds:.1f} ", end="")
            print(f"| {sizes[window]:.1f} | {share:.1%} |", flush=True)


if __name__ == "__main__":
    main()
