"""A rank's division of memory: its error, and what the log says of the pools.

The numbers: ``tests/launch/test_servers.py``, on servers.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.errors import DFlashError
from sglang_dflash.features import pool_sizes
from tests.support.configs import serve, serving_plan

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("gib", [6e-6, -3e-9])
def test_weights_that_leave_nothing_are_an_error(gib: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a server that replays; a request takes five states of 1,000 bytes."""
    for name, value in {
        "get_schedule": SimpleNamespace(max_running_requests=8, max_mamba_cache_size=None, mamba_full_memory_ratio=0.9),
        "get_memory": SimpleNamespace(disable_radix_cache=False),
        "get_disagg": SimpleNamespace(disaggregation_mode="null"),
    }.items():
        monkeypatch.setattr(pool_sizes, name, lambda value=value: value)
    monkeypatch.setattr(pool_sizes, "create_memory_pool_configurator", lambda _: SimpleNamespace(_cell_size=10))
    serve(monkeypatch, block=16, replay=True, records=16)
    shape, dtype = SimpleNamespace(conv=[(4, 3)]), SimpleNamespace(conv=SimpleNamespace(itemsize=2))
    params = SimpleNamespace(shape=shape, dtype=dtype, layers=range(2), mamba_cache_per_req=1000)
    params.replayssm_ring_bytes_per_req = lambda record_len: 7
    configurator = SimpleNamespace(mambaish_config=SimpleNamespace(mamba2_cache_params=params), attn_dp_size=2)
    configurator.model_config = SimpleNamespace(context_len=20)
    configurator._calculate_mamba_ratio = lambda: 5
    with pytest.raises(DFlashError, match=r"the weights leave .*, and the states of one .* Fix: raise --mem-fraction"):
        pool_sizes.divide(lambda *_: None, configurator, gib)


@pytest.mark.parametrize(("running", "fix"), [(7, "--mamba-f"), (6, "a lower --mamba-f")])
def test_a_server_that_runs_fewer_requests_names_what_raises_them(
    running: int, fix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(size=36)),
        **{"max_total_num_tokens": 5000, "max_running_requests": running, "token_to_kv_pool": None},
    )
    monkeypatch.setattr(pool_sizes, "get_schedule", lambda: SimpleNamespace(max_running_requests=16))
    monkeypatch.setattr(pool_sizes, "get_parallel", lambda: SimpleNamespace(attn_dp_size=2))
    with caplog.at_level("INFO"):
        counts = pool_sizes.log_pools(serving_plan(replay=True), target, 5)
    assert (counts["asked"], counts["running"]) == (8, running)
    assert str(counts["raised_by"]).startswith(fix) and f"Fix: {fix}" in caplog.text
    assert f"{running} of 8 requests at once; block 8; K/V 5,000" in caplog.text
