"""SGLang's own division, called with our hook around it, gives the pools that ``sglang-dflash check`` predicts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache import kv_cache_configurator as sglangs

from sglang_dflash.check.pools import Sizing, fit
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.division import STATE_SHARE
from sglang_dflash.plan.serving import DraftWindow
from sglang_dflash.worker import pools, window
from tests.support.configs import checked, memory_of, serve, serving_plan

pytestmark = pytest.mark.sglang

NAME, GIB = "Qwen3.6-27B", 1 << 30
CARD = ("--mem-fraction-static", "0.75", "--speculative-num-draft-tokens", "16", "--enable-linear-replayssm-spec")

DP_ATTENTION = ("--tp-size", "2", "--attn-dp-size", "2", "--enable-dp-lm-head")


def set_up(sizing: Sizing, monkeypatch: pytest.MonkeyPatch, groups: int = 1) -> tuple[Any, Any]:
    """Return a configurator with these sizes, and the resolved arguments, of which SGLang overrides one.

    Of one of ``groups`` groups of ranks under DP attention.
    """
    state, conv, itemsize, ring = sizing.replayed, (10_240, 3), 2, 16
    per_window = 10_240 * (3 + sizing.block - 1) * itemsize  # of a layer: exact, or the budget would be another
    layers = (state.scratch - state.records) // per_window
    assert layers * per_window == state.scratch - state.records
    params = SimpleNamespace(
        shape=SimpleNamespace(conv=[conv]),
        dtype=SimpleNamespace(conv=SimpleNamespace(itemsize=itemsize)),
        layers=range(layers),
        mamba_cache_per_req=state.slot,
        replayssm_ring_bytes_per_req=lambda record_len: state.records * record_len // ring,
    )
    has_ring = sizing.ring is not None
    configurator: Any = SimpleNamespace(
        mambaish_config=SimpleNamespace(mamba2_cache_params=params),
        model_config=SimpleNamespace(context_len=sizing.context),
        spec_algorithm=SimpleNamespace(is_none=lambda: False),
        fused_entry_bytes=lambda _: None,
        dflash_draft_cell_size_per_token=sizing.draft_kv,
        **{"pp_size": 1, "attn_dp_size": groups, "hybrid_gdn_config": object(), "hybrid_kda_config": None},
        extra_mamba_cache_bytes_per_req=0,
        _calculate_mamba_ratio=lambda: sizing.slots_per_request,
    )
    states = None if sizing.slots_per_request == 1 or not sizing.max_states else sizing.max_states * groups
    schedule = SimpleNamespace(
        max_running_requests=sizing.max_running * groups,
        mamba_full_memory_ratio=sizing.state_share,
        max_mamba_cache_size=states,
    )
    memory = SimpleNamespace(disable_radix_cache=sizing.slots_per_request == 1, enable_unified_memory=False)
    mamba = SimpleNamespace(enable_linear_replayssm_spec=True, linear_replayssm_cache_len=ring)
    disagg = SimpleNamespace(
        disaggregation_mode="null" if sizing.in_transfer is None else "decode",
        disaggregation_decode_extra_slots=sizing.in_transfer,
    )
    spec = SimpleNamespace(speculative_num_draft_tokens=sizing.block)
    context = SimpleNamespace(override=lambda _, **changes: vars(schedule).update(changes))
    for module in (pools, sglangs, window):
        for name, value in {
            "get_schedule": schedule, "get_memory": memory, "get_exec": SimpleNamespace(mamba=mamba),
            "get_spec": spec, "get_context": context, "get_disagg": disagg,
        }.items():  # fmt: skip
            monkeypatch.setattr(module, name, lambda value=value: value, raising=False)
    cell = SimpleNamespace(_cell_size=sizing.target_kv + sizing.draft_kv)
    monkeypatch.setattr(pools, "create_memory_pool_configurator", lambda _: cell)
    rings = None
    if has_ring:
        rings = DraftWindow(2048, sizing.block, sizing.page)
        assert rings.ring_slots(sizing.context) == sizing.ring
    serve(monkeypatch, block=sizing.block, replay=True, window=rings)
    return configurator, schedule


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--max-running-requests", "8"),
        ("--context-length", "4096"),
        ("--speculative-draft-window-size", "2048"),
        ("--speculative-draft-window-size", "2048", "--max-running-requests", "200"),
        ("--mamba-full-memory-ratio", "2.5"),
        ("--mamba-full-memory-ratio", "0.2"),
        ("--max-mamba-cache-size", "77"),
        ("--mamba-radix-cache-strategy", "extra_buffer_lazy"),
        ("--disable-radix-cache",),
        ("--disaggregation-mode", "decode"),
        ("--disaggregation-mode", "decode", "--speculative-draft-window-size", "2048"),
        DP_ATTENTION,
        (*DP_ATTENTION, "--max-mamba-cache-size", "154"),
        (*DP_ATTENTION, "--speculative-draft-window-size", "2048"),
    ],
    ids=" ".join,
)
def test_slots_and_kv_are_those_that_check_predicts(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    table = memory_of(NAME, *CARD, *flags)
    predicted, sizing = table.served, table.served.sizing
    configurator, schedule = set_up(sizing, monkeypatch, groups=2 if DP_ATTENTION[2] in flags else 1)
    free = (table.static_bytes - sizing.weights) / GIB
    rest = pools.divide(sglangs.KVCacheConfigurator._handle_max_mamba_cache, configurator, free) * GIB
    allocated = schedule.max_mamba_cache_size
    assert min(sizing.max_running, allocated // sizing.slots_per_request) == predicted.running
    # A decoding server's pool has at least a slot for every row: SGLang adds it later, without a budget.
    assert max(allocated, predicted.held if sizing.in_transfer else 0) == predicted.state_slots
    rings = window.ring_bytes(pools.serving.the_plan(), configurator)
    assert (rest - rings) // sizing.per_token == pytest.approx(predicted.tokens, abs=1)
    if "--mamba-full-memory-ratio" in flags:
        own = schedule.mamba_full_memory_ratio / (1 + schedule.mamba_full_memory_ratio)
        assert allocated * sizing.replayed.slot < own * free * GIB, "the user's ratio decides alone"
    if "--max-mamba-cache-size" in flags:
        assert allocated == 77


def test_weights_that_leave_nothing_are_an_error_that_check_gives_before(monkeypatch: pytest.MonkeyPatch) -> None:
    report = checked(NAME, *CARD, "--mem-fraction-static", "0.42")
    [finding] = [each for each in report.findings if each.about == "running requests"]
    assert finding.level == "error" and "weights and one request need more than" in finding.value
    assert report.memory is not None
    sizing, static = report.memory.served.sizing, report.memory.static_bytes
    assert fit(sizing, static, replay=True).running == 0
    for free in ((static - sizing.weights) / GIB, -3.0):
        configurator, schedule = set_up(sizing, monkeypatch)
        with pytest.raises(DFlashError, match=r"the weights leave .* Expected: K/V, and .* Fix: raise --mem-fraction"):
            pools.divide(sglangs.KVCacheConfigurator._handle_max_mamba_cache, configurator, free)
        assert schedule.max_mamba_cache_size is None


def test_kept_states_and_sglangs_own_worker_are_divided_by_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    configurator, schedule = set_up(memory_of(NAME, *CARD).served.sizing, monkeypatch)
    pools.get_exec().mamba.enable_linear_replayssm_spec = False
    assert pools.divide(lambda *given: given, configurator, 7.0) == (configurator, 7.0)
    assert schedule.max_mamba_cache_size is None and schedule.mamba_full_memory_ratio == STATE_SHARE


@pytest.mark.parametrize(
    ("replay", "running", "fix"),
    [(False, 7, "SGLANG_DFLASH_STATE_REPLAY=1, a narrower"), (True, 7, "--mamba-f"), (True, 6, "a lower --mamba-f")],
)
def test_a_server_that_runs_fewer_requests_names_what_raises_them(
    replay: bool, running: int, fix: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(mamba_pool=SimpleNamespace(size=36)),
        **{"max_total_num_tokens": 5000, "max_running_requests": running},
    )
    monkeypatch.setattr(pools, "get_schedule", lambda: SimpleNamespace(max_running_requests=16))
    monkeypatch.setattr(pools, "get_parallel", lambda: SimpleNamespace(attn_dp_size=2))
    with caplog.at_level("INFO"):
        counts = pools.log_pools(serving_plan(replay=replay), target, 5)
    assert (counts["asked"], counts["running"]) == (8, running)
    assert str(counts["raised_by"]).startswith(fix) and f"Fix: {fix}" in caplog.text
    assert (
        f"{running} of 8 requests at once; block 8, states {'replayed' if replay else 'kept'}; K/V 5,000" in caplog.text
    )
