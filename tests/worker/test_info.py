"""What ``/server_info`` says of the pools, whatever verification keeps there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash.worker.observe.allocated import allocated_bytes

pytestmark = pytest.mark.sglang


def runner(request_pool: Any = None) -> Any:
    kv = SimpleNamespace(get_kv_size_bytes=lambda: (8, 8))
    model = torch.nn.Linear(2, 2, bias=False)
    return SimpleNamespace(model=model, token_to_kv_pool=kv, req_to_token_pool=request_pool)


def cache(**tensors: torch.Tensor | None) -> Any:
    """SGLang's record of a pool of recurrent states, as it is with these tensors."""
    conv, windows = [torch.zeros(3)], [torch.zeros(5)]
    state = MambaPool.SpeculativeState(
        conv=conv, temporal=torch.zeros(7), intermediate_conv_window=windows, **{"intermediate_ssm": None, **tensors}
    )
    pool = SimpleNamespace(mamba_cache=state, _intermediate_conv_window_phys=None)
    return SimpleNamespace(mamba_pool=pool)


def test_a_state_per_block_position_is_scratch() -> None:
    sizes = allocated_bytes(runner(cache(intermediate_ssm=torch.zeros(11))), runner())
    assert (sizes["states"], sizes["scratch"]) == (4 * 10, 4 * 16)


def test_replay_keeps_inputs_and_no_states() -> None:
    """Under ``--enable-linear-replayssm-spec`` there is no ``intermediate_ssm``."""
    sizes = allocated_bytes(runner(cache(replayssm_d=torch.zeros(2), replayssm_g=torch.zeros(1))), runner())
    assert (sizes["states"], sizes["scratch"]) == (4 * 10, 4 * (5 + 3))


def test_a_dense_target_has_neither() -> None:
    sizes = allocated_bytes(runner(SimpleNamespace()), runner())
    assert (sizes["states"], sizes["scratch"]) == (0, 0)
    assert sizes["target_weights"] == sizes["target_kv"] == 16
