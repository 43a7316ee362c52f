"""The pools' memory in ``/server_info``, with each way to keep a block's states."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.mem_cache.memory_pool import MambaPool

from sglang_dflash.worker.observe.metrics import allocated_bytes

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    ("kept", "numbers"),
    [
        ({"intermediate_ssm": torch.zeros(11)}, (10, 5 + 11)),
        # ``--enable-linear-replayssm-spec`` keeps inputs instead of states.
        ({"intermediate_ssm": None, "replayssm_d": torch.zeros(2), "replayssm_g": torch.zeros(1)}, (10, 5 + 3)),
        (None, (0, 0)),
    ],
    ids=["a state per position", "replay", "dense"],
)
def test_states_and_scratch_are_counted_separately(kept: dict[str, Any] | None, numbers: tuple[int, int]) -> None:
    def runner(request_pool: Any = None) -> Any:
        kv = SimpleNamespace(get_kv_size_bytes=lambda: (8, 8))
        model = torch.nn.Linear(2, 2, bias=False)
        return SimpleNamespace(model=model, token_to_kv_pool=kv, req_to_token_pool=request_pool)

    request_pool: Any = SimpleNamespace()
    if kept is not None:
        always = {"conv": [torch.zeros(3)], "temporal": torch.zeros(7), "intermediate_conv_window": [torch.zeros(5)]}
        cache = MambaPool.SpeculativeState(**always, **kept)
        request_pool.mamba_pool = SimpleNamespace(mamba_cache=cache, _intermediate_conv_window_phys=None)
    sizes = allocated_bytes(runner(request_pool), runner())
    assert (sizes["states"], sizes["scratch"]) == tuple(4 * count for count in numbers)
    assert sizes["target_weights"] == sizes["target_kv"] == 16
