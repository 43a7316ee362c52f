"""Memory outside the static share: as much as SGLang's attention backends set aside, and what is said of it."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any
from unittest.mock import MagicMock

import pytest

from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS
from sglang_dflash.plan.pools import CapturedModel, graph_buffers, sampling
from sglang_dflash.plan.report import lines, preflight
from tests.support.cards import FOLDER

BATCH, BLOCK, CONTEXT = 48, 16, 262_144


def buffers(model: CapturedModel, *widths: int, page: int = 1) -> int:
    return sum(graph_buffers(model, batch=BATCH, width=width, context=CONTEXT, page=page) for width in widths)


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


def backend(name: str, reader: CapturedModel, page: int, width: int) -> Any:
    """SGLang's backend as its constructor leaves it, in the attributes that size its graphs' buffers."""
    import torch

    module, kind = KINDS[name]
    made_of = getattr(importlib.import_module(f"sglang.srt.layers.attention.{module}"), kind)
    made = made_of.__new__(made_of)
    vars(made).update(
        device="meta",
        max_context_len=CONTEXT,
        max_num_pages=-(-CONTEXT // page),
        page_size=page,
        num_wrappers=1 if reader.window is None else 2,
        sliding_window_size=reader.window,
        speculative_num_draft_tokens=width,
        num_draft_tokens=width,
        num_head=reader.heads,
        v_head_dim=reader.head_dim,
        max_kv_splits=8,
        is_draft_runner=bool(reader.drafter_block),
        expand_encoder_only_verify=bool(reader.drafter_block),
        kv_indptr=[torch.empty(0)] * 2,
        topk=1,
        dllm_attention=None,
        local_attn_builder=None,
        swa_v_head_dim=None,
        use_mla=False,
        use_sliding_window_kv_pool=False,
        is_encoder_decoder=False,
        skip_prefill=False,
        has_swa=False,
        _get_scheduler_metadata=None,
        _alloc_swa_page_table=lambda *_: None,
        lean_total_programs=1,
        lean_block_m=1,
    )
    return made


@pytest.mark.sglang
@pytest.mark.parametrize("width", [4, 16])
@pytest.mark.parametrize("drafts", [0, BLOCK], ids=["target", "drafter"])
@pytest.mark.parametrize(
    ("name", "page", "window"),
    [("fa3", 1, None), ("fa3", 64, None), ("trtllm_mha", 64, None)]
    + [(name, 1, window) for name in ("flashinfer", "triton") for window in (None, 2048)],
)
def test_a_set_of_graphs_takes_what_sglang_allocates(
    name: str, page: int, window: int | None, drafts: int, width: int, monkeypatch: pytest.MonkeyPatch
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
    found = backend(name, reader, page, width)
    before = tensors(list(vars(found).values()))
    found.init_cuda_graph_state(BATCH, BATCH * width)
    allocated = tensors(list(vars(found).values())) - before
    assert buffers(reader, width, page=page) == pytest.approx(allocated, rel=0.03)


def test_the_anchor_alone_needs_no_drafter_and_every_width_its_own() -> None:
    target, drafter = CapturedModel("fa3", 24, 256), CapturedModel("fa3", 32, 128, drafter_block=BLOCK)
    one = buffers(target, 1)
    assert one == pytest.approx(4 * BATCH * CONTEXT * 4, rel=0.05)
    assert buffers(target, 1, 4, 16, 32) == 4 * one
    assert buffers(drafter, 1, 4, 16, 32) == 2 * one, "copies fill what the drafter does not"


def test_sampling_peaks_at_the_logits_and_a_copy() -> None:
    assert sampling(768, 248_320) == 8 * 768 * 248_320
    assert sampling(16, 248_320) == 4 * 5 * 16 * 248_320


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (("--mem-fraction-static", "0.85"), "ok"),
        (("--mem-fraction-static", "0.98"), "warn"),
        (("--attention-backend", "triton", "--max-running-requests", "256"), "warn"),
        (("--attention-backend", "triton", "--max-running-requests", "256", "--cuda-graph-max-bs-decode", "16"), "ok"),
        (("--attention-backend", "triton", "--max-running-requests", "256", "--disable-decode-cuda-graph"), "ok"),
    ],
)
def test_too_little_beside_the_static_share_is_a_warning_that_names_a_fraction(
    flags: tuple[str, ...], level: str
) -> None:
    """A 27B on one H200: with the fraction that it names, all is well."""
    found, finding = checked(*flags)
    assert finding.level == level
    assert any("outside: sampling" in line for line in lines(found.memory.served, headroom=found.memory.headroom))
    if level == "warn" and (named := re.search(r"--mem-fraction-static ([0-9.]+)", finding.remedy)):
        assert checked(*flags, "--mem-fraction-static", named[1])[1].level == "ok"


def checked(*flags: str) -> tuple[Any, Any]:
    pair = FOLDER / "Qwen3.6-27B"
    args = parse(flags, target=str(pair / "target"), drafter=str(pair / "drafter"))[0]
    found = preflight(args, GPUS["h200"])
    [finding] = [each for each in found.findings if each.about == "memory outside the static fraction"]
    return found, finding
