"""Dummy batches, with which the worker runs its own steps before the first request."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from sglang_dflash.upstream.worker import (
    ForwardMode,
    Req,
    SamplingBatchInfo,
    SamplingParams,
    ScheduleBatch,
    get_schedule,
)
from sglang_dflash.worker.state import DraftState

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner

CONTEXT = 64  # tokens


def dummy_batch(target: ModelRunner, bs: int, context: int) -> ScheduleBatch:
    """Return ``bs`` greedy requests of ``context`` tokens before a step.

    They use rows 1 to ``bs`` of the request pool, which real requests overwrite when they start. Before the first
    request these rows point to slot 0, so K/V and recurrent states go to the pools' padding slots.
    """
    device, vocab = target.device, target.model_config.vocab_size
    context = min(context, target.model_config.context_len - 1)
    rows = torch.arange(1, bs + 1)
    lens = torch.full((bs,), context)
    batch = ScheduleBatch(
        reqs=[
            Req(f"dummy {row}", "", array("q", [0] * context), SamplingParams(), vocab_size=vocab) for row in range(bs)
        ],
        req_to_token_pool=target.req_to_token_pool,
        tree_cache=SimpleNamespace(page_size=get_schedule().page_size),
        model_config=target.model_config,
        device=device,
        forward_mode=ForwardMode.DECODE,
        spec_algorithm=target.spec_algorithm,
        req_pool_indices=rows.to(device),
        req_pool_indices_cpu=rows,
        seq_lens=lens.to(device),
        seq_lens_cpu=lens,
        seq_lens_sum=bs * context,
        orig_seq_lens=lens.to(device),
        mamba_lazy_spec_track_positions_cpu=[0] * bs,  # the requests have no snapshot to write
        multimodal_inputs=[None] * bs,
        sampling_info=dummy_sampling(target, bs, filtered=False),
    )
    batch.spec_info = DraftState(torch.zeros_like(batch.seq_lens), batch.seq_lens, in_flight=0)
    batch.spec_info.committed_cpu = [context] * bs
    return batch


def dummy_sampling(target: ModelRunner, rows: int, *, filtered: bool) -> SamplingBatchInfo:
    """Return greedy sampling of ``rows`` rows, or sampling with every filter (top-k, top-p and min-p)."""
    device, vocab = target.device, target.model_config.vocab_size
    return SamplingBatchInfo(
        temperatures=torch.ones(rows, 1, device=device),
        top_ps=torch.full((rows,), 0.95, device=device),
        top_ks=torch.full((rows,), vocab, dtype=torch.int32, device=device),
        min_ps=torch.full((rows,), 0.01, device=device),
        is_all_greedy=not filtered,
        is_any_greedy=not filtered,
        need_top_p_sampling=filtered,
        need_top_k_sampling=filtered,
        need_min_p_sampling=filtered,
        vocab_size=vocab,
        device=str(device),
    )
