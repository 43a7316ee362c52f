"""Recurrent states of a running request, by the flags that decide it."""

from __future__ import annotations

import inspect

import pytest

from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.settings import in_transfer, slots_per_request


@pytest.mark.parametrize(
    ("flags", "slots"),
    [
        ("", 5),
        ("--mamba-radix-cache-strategy extra_buffer", 5),
        ("--mamba-radix-cache-strategy extra_buffer_lazy", 4),
        ("--disable-overlap-schedule", 4),
        ("--mamba-radix-cache-strategy no_buffer", 3),
        ("--mamba-radix-cache-strategy extra_buffer --disable-radix-cache", 1),
        ("--disaggregation-mode decode", 1),
        ("--disaggregation-mode prefill", 5),
    ],
)
def test_slots_of_a_running_request(flags: str, slots: int) -> None:
    assert slots_per_request(parse(flags.split(), target="t", drafter="d")[0]) == slots


@pytest.mark.parametrize(
    ("flags", "waiting"),
    [
        ("", None),
        ("--disaggregation-mode prefill", 0),
        ("--disaggregation-mode decode", 0),
        ("--disaggregation-mode decode --max-running-requests 33", 0),
        ("--disaggregation-mode decode --max-running-requests 32", 64),
        ("--disaggregation-mode decode --max-running-requests 32 --disaggregation-decode-extra-slots 5", 5),
    ],
)
def test_requests_in_transfer(flags: str, waiting: int | None) -> None:
    assert in_transfer(parse(flags.split(), target="t", drafter="d")[0]) == waiting


@pytest.mark.sglang
def test_sglang_allocates_no_verify_scratch_on_a_prefill_server() -> None:
    """``Demand.verifies`` rests on this: both the budget and the pool ask one function, which has three exceptions."""
    pytest.importorskip("sglang")
    from sglang.srt.mem_cache import kv_cache_configurator as configurator

    skips = "_pd_prefill_skips_mamba_spec_state()"
    budget = inspect.getsource(configurator.KVCacheConfigurator._handle_max_mamba_cache)
    pool = inspect.getsource(configurator.KVCacheConfigurator._build_hybrid_req_pool)
    assert f"and not {skips}" in budget and f"None\n                if {skips}" in pool
    rule = inspect.getsource(configurator._pd_prefill_skips_mamba_spec_state)
    exceptions = ("disagg.enable_pd_role_switch", "get_memory().enable_unified_memory", "_is_npu")
    assert 'disagg.disaggregation_mode == "prefill"' in rule
    assert rule.count("and not ") == 3 and all(f"and not {each}" in rule for each in exceptions)
