"""Memory outside the static fraction: the buffers that SGLang's attention backends allocate, and sampling."""

from __future__ import annotations

import importlib
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_dflash.check.pools import CapturedModel, graph_buffers
from sglang_dflash.plan.division import sampling

BATCH, BLOCK, CONTEXT = 48, 16, 262_144


def buffers(model: CapturedModel, *widths: int, page: int = 1, **mode: bool) -> int:
    return sum(graph_buffers(model, batch=BATCH, width=width, context=CONTEXT, page=page, **mode) for width in widths)


def tensors(value: Any) -> int:
    """Bytes of the tensors in an object's attributes."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(map(tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensors, value))
    return tensors(value.buffer) if hasattr(value, "buffer") else 0


KINDS = {
    "fa3": ("flashattention_backend", "FlashAttentionBackend"),
    "flashinfer": ("flashinfer_backend", "FlashInferAttnBackend"),
    "triton": ("triton_backend", "TritonAttnBackend"),
    "trtllm_mha": ("trtllm_mha_backend", "TRTLLMHAAttnBackend"),
}


def backend(name: str, reader: CapturedModel, page: int, width: int, splits: int) -> Any:
    """SGLang's backend as its constructor leaves it, in the attributes that size its graphs' buffers."""
    import torch

    module, kind = KINDS[name]
    made_of = getattr(importlib.import_module(f"sglang.srt.layers.attention.{module}"), kind)
    made, drafts = made_of.__new__(made_of), bool(reader.drafter_block)
    sizes = {"max_context_len": CONTEXT, "max_num_pages": -(-CONTEXT // page), "page_size": page, "topk": 1}
    sizes |= dict.fromkeys(("speculative_num_draft_tokens", "num_draft_tokens"), width)
    sizes |= {"num_head": reader.heads, "v_head_dim": reader.head_dim, "max_kv_splits": splits}
    sizes |= {"num_wrappers": 1 if reader.window is None else 2, "lean_total_programs": 1, "lean_block_m": 1}
    absent = ("dllm_attention", "local_attn_builder", "swa_v_head_dim", "_get_scheduler_metadata")
    off = ("use_mla", "use_sliding_window_kv_pool", "is_encoder_decoder", "skip_prefill", "has_swa")
    vars(made).update(
        sizes | dict.fromkeys(absent) | dict.fromkeys(off, False),
        device="meta",
        sliding_window_size=reader.window,
        is_draft_runner=drafts,
        expand_encoder_only_verify=drafts,
        kv_indptr=[torch.empty(0)] * 2,
        _alloc_swa_page_table=lambda *_: None,
    )
    return made


@pytest.mark.sglang
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("drafts", [0, BLOCK], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("name", "page", "window", "splits"),
    [("fa3", 1, None, 8), ("fa3", 64, None, 8), ("trtllm_mha", 64, None, 8)]
    + [(name, 1, window, 8) for name in ("flashinfer", "triton") for window in (None, 2048)]
    + [("triton", 1, None, CONTEXT // 256)],  # of deterministic inference
)
def test_a_set_of_graphs_takes_what_sglang_allocates(
    name: str, page: int, window: int | None, splits: int, drafts: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("sglang")
    import torch
    from sglang.srt.speculative import eagle_utils

    for absent in ("sgl_kernel", "sgl_kernel.flash_attn"):  # compiled for CUDA; nothing of it is called
        monkeypatch.setitem(sys.modules, absent, MagicMock())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, **kw: zeros(*size, **{**kw, "device": "meta"}))
    monkeypatch.setattr(eagle_utils, "_is_cpu", False)
    reader = CapturedModel(name, 24, 256, window, drafts)
    found = backend(name, reader, page, width, splits)
    before = tensors(list(vars(found).values()))
    found.init_cuda_graph_state(BATCH, BATCH * width)
    allocated = tensors(list(vars(found).values())) - before
    assert buffers(reader, width, page=page, deterministic=splits > 8) == pytest.approx(allocated, rel=0.03)


def test_the_anchor_alone_needs_no_drafter_and_every_width_its_own() -> None:
    target, drafter = CapturedModel("fa3", 24, 256), CapturedModel("fa3", 32, 128, drafter_block=BLOCK)
    one = buffers(target, 1)
    assert one == pytest.approx(4 * BATCH * CONTEXT * 4, rel=0.05)
    assert buffers(target, 1, 4, 16, 32) == 4 * one
    assert buffers(drafter, 1, 4, 16, 32) == 2 * one, "copies fill what the drafter does not"


def test_sampling_peaks_at_the_logits_and_a_copy() -> None:
    assert sampling(768, 248_320) == 8 * 768 * 248_320
