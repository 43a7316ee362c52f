"""Sizes and division of recurrent states as SGLang itself has them, for the published targets: nothing is allocated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateDType, Mamba2StateShape
from sglang.srt.mem_cache import kv_cache_configurator, memory_pool
from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash.drafter.config import load_config, text_config
from sglang_dflash.memory.fit import Demand, fit
from sglang_dflash.memory.machine import GIB
from sglang_dflash.memory.sizes import StateBytes, full_layers, state_bytes
from sglang_dflash.plan.demand import STATE_SHARE
from sglang_dflash.states import pool as state_pool
from sglang_dflash.states.choice import ring_length
from sglang_dflash.worker.observe.allocated import allocated_bytes
from tests.support.cards import FOLDER, NAMES
from tests.support.plan import serve

pytestmark = pytest.mark.sglang

SLOTS, BLOCK, ASKED = 5, 16, 48
KV = 65_536  # bytes a token


def params(name: str, conv: torch.dtype, tp: int) -> Mamba2CacheParams:
    """SGLang's description of a target's state."""
    text = text_config(load_config(FOLDER / name / "target"))
    head = int(text["linear_value_head_dim"])
    shape = Mamba2StateShape.create(
        tp_world_size=tp,
        intermediate_size=head * int(text["linear_num_value_heads"]),
        n_groups=int(text["linear_num_key_heads"]),
        num_heads=int(text["linear_num_value_heads"]),
        head_dim=head,
        state_size=int(text["linear_key_head_dim"]),
        conv_kernel=int(text["linear_conv_kernel_dim"]),
    )
    layers = list(range(int(text["num_hidden_layers"]) - full_layers(text)))
    return Mamba2CacheParams(shape=shape, layers=layers, dtype=Mamba2StateDType(conv=conv, temporal=torch.float32))


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


def division(
    monkeypatch: pytest.MonkeyPatch, name: str, rest: float, *, replay: bool, **chosen: Any
) -> tuple[int, float]:
    """SGLang's own: state slots, and the bytes that are left of ``rest`` for K/V."""
    schedule = SimpleNamespace(
        max_mamba_cache_size=chosen.get("max_states"),
        max_running_requests=ASKED,
        mamba_full_memory_ratio=STATE_SHARE,
        disable_overlap_schedule=False,
    )
    mamba = SimpleNamespace(
        enable_linear_replayssm_spec=replay,
        linear_replayssm_cache_len=ring_length(BLOCK),
        enable_mamba_extra_buffer=True,
        enable_mamba_extra_buffer_lazy=False,
    )
    for name_, value in {
        "get_schedule": schedule,
        "get_exec": SimpleNamespace(mamba=mamba),
        "get_spec": SimpleNamespace(speculative_num_draft_tokens=BLOCK),
        "get_memory": SimpleNamespace(disable_radix_cache=False),
        "get_context": SimpleNamespace(override=lambda _, **values: vars(schedule).update(values)),
        "_pd_prefill_skips_mamba_spec_state": False,
    }.items():
        monkeypatch.setattr(kv_cache_configurator, name_, lambda value=value: value)
        if hasattr(state_pool, name_):
            monkeypatch.setattr(state_pool, name_, lambda value=value: value)
    serve(monkeypatch)
    configurator = kv_cache_configurator.KVCacheConfigurator
    itself = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params(name, torch.bfloat16, 1)),
        hybrid_gdn_config=object(),
        hybrid_kda_config=None,
        pp_size=1,
        attn_dp_size=1,
        extra_mamba_cache_bytes_per_req=0,
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        fused_entry_bytes=lambda _: None,
    )
    itself._calculate_mamba_ratio = lambda: configurator._calculate_mamba_ratio(itself)
    left = state_pool.charge_windows(configurator._handle_max_mamba_cache, itself, rest / GIB)
    return schedule.max_mamba_cache_size, left * GIB


@pytest.mark.parametrize("chosen", [{}, {"max_states": 60}], ids=["by ratio", "by the user"])
@pytest.mark.parametrize("replay", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_memory_is_divided_as_sglang_divides_it(
    name: str, replay: bool, chosen: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed, rest = state(name), 51 * GIB
    demand = Demand(
        target_weights=0,
        drafter_weights=0,
        target_kv=KV,
        draft_kv=0,
        state=computed,
        block=BLOCK,
        slots_per_request=SLOTS,
        state_share=STATE_SHARE,
        max_running=ASKED,
        **chosen,
    )
    slots, left = division(monkeypatch, name, rest, replay=replay, **chosen)
    fitted = fit(demand, rest, replay=replay)
    assert fitted.state_slots == slots
    assert fitted.tokens == pytest.approx(left // KV, abs=1)
