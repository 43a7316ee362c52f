"""Sizes and division of recurrent states as SGLang itself has them, for the published targets: nothing is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash.check.sizes import StateBytes, state_bytes
from sglang_dflash.drafter.config import load_config, text_config
from sglang_dflash.plan.pair import full_layers
from sglang_dflash.plan.settings import ring_length
from sglang_dflash.worker.telemetry import allocated_bytes
from tests.support.cards import FOLDER, NAMES
from tests.support.gdn_replay import cache_params

pytestmark = pytest.mark.sglang

BLOCK = 16


def params(name: str, conv: torch.dtype, tp: int) -> Any:
    text = text_config(load_config(FOLDER / name / "target"))
    keys = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
    heads = [int(text[key]) for key in keys]
    layers = int(text["num_hidden_layers"]) - full_layers(text)
    return cache_params(layers, *heads, window=int(text["linear_conv_kernel_dim"]) - 1, tp=tp, conv=conv)


def state(name: str, conv: torch.dtype = torch.bfloat16, tp: int = 1) -> StateBytes:
    """Ours."""
    text = text_config(load_config(FOLDER / name / "target"))
    return state_bytes(text, recurrent_bytes=4, conv_bytes=conv.itemsize, tp_size=tp)


@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize(("conv", "tp"), [(torch.bfloat16, 1), (torch.float32, 1), (torch.bfloat16, 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_pool_takes_the_bytes_that_are_computed(
    name: str, conv: torch.dtype, tp: int, replay: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: True)  # as on CUDA and on our CPU platform
    described, computed, ring = params(name, conv, tp), state(name, conv, tp), ring_length(BLOCK)
    pool = MambaPool(
        size=40,
        spec_state_size=7,
        cache_params=described,
        mamba_layer_ids=described.layers,
        device="meta",
        speculative_num_draft_tokens=BLOCK,
        linear_replayssm_cache_len=ring,
        enable_linear_replayssm_spec=replay,
    )
    kv, model = SimpleNamespace(get_kv_size_bytes=lambda: (0, 0)), torch.nn.Identity()
    requests = SimpleNamespace(mamba_pool=pool)
    runner: Any = SimpleNamespace(model=model, token_to_kv_pool=kv, req_to_token_pool=requests)
    pools = allocated_bytes(runner, runner)
    assert pools["states"] == 41 * computed.slot
    assert pools["scratch"] == 8 * (computed.records(BLOCK, ring) if replay else computed.snapshots(BLOCK))
    assert ring * computed.record == described.replayssm_ring_bytes_per_req(ring)
