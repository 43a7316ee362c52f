"""The table of a rank's memory, as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.plan.advice import Advice
from sglang_dflash.plan.pools import Pools, RequestState, Sizing, fit
from sglang_dflash.plan.report import lines
from sglang_dflash.plan.sizes import StateBytes

KIB, MIB = 1 << 10, 1 << 20
STATE = StateBytes(recurrent=9 * MIB, conv=3 * KIB, conv_column=KIB, record=KIB)
SIZING = Sizing(
    target_weights=100 * MIB,
    drafter_weights=20 * MIB,
    target_kv=8 * KIB,
    draft_kv=2 * KIB,
    kept=RequestState(STATE.slot, STATE.snapshots(4)),
    replayed=RequestState(STATE.slot, STATE.records(4, 16), 16 * KIB),
    block=4,
    slots_per_request=5,
    context=4096,
    state_share=1.0,
    max_running=8,
)
LONG = RequestState(STATE.slot, STATE.records(4, 4096), 4096 * KIB)
STATIC = 1120 * MIB


def pools(*, replay: bool = False, **changes: object) -> Pools:
    demand = replace(SIZING, **changes)  # type: ignore[arg-type]
    return fit(demand, STATIC, replay=replay)


def test_both_ways_stand_side_by_side() -> None:
    table = lines(pools(replay=True), pools(), [Advice("--flag 2", 8, 4096, 0)])
    rows = {line[:32].strip(): line[32:].split() for line in table}
    assert rows["states of a block"] == ["replayed", "kept"]
    assert rows["recurrent states, 5 slots"][:4] == ["45.0", "MiB", "per", "request"]
    scratch = rows["verify scratch, block of 4"]
    assert scratch[:4] == ["22.0", "KiB", "per", "request"]  # 16 records, and 3 + 3 inputs
    assert scratch[6:10] == ["36.0", "MiB", "per", "request"]
    assert rows["requests at once, of 8"] == ["8", "5"]
    assert table[-1] == "more would fit with --flag 2 (8 requests, 4096 tokens of K/V)"


def test_prefixes_by_strategy_and_what_one_costs() -> None:
    """Of 60 slots, 8 requests hold four each (state, two snapshots, their own prefix); a lazy buffer is one less."""
    table = lines(pools(replay=True, max_states=60), prefixes=[Advice("--flag 2", 8, 4096, 40)])
    rows = {line[:32].strip(): line[32:].split() for line in table}
    assert rows["additional prefixes kept"] == ["28"]
    assert (rows["with extra_buffer_lazy"], rows["with no_buffer"]) == (["36"], ["44"])
    assert rows["one more costs"] == ["922", "tokens", "of", "K/V", "9.0", "MiB"]  # 9 MiB and 3 KiB in tokens of 10 KiB
    assert table[-1].startswith("prefixes with --flag 2: 40, tokens of K/V -")


def test_without_a_prefix_cache_there_are_none() -> None:
    assert pools(slots_per_request=1, max_states=8).prefixes() == 0
    assert "prefixes" not in "\n".join(lines(pools(slots_per_request=1, max_states=8)))


def test_a_dense_target_has_no_states() -> None:
    dense = pools(kept=RequestState())
    table = "\n".join(lines(dense))
    assert "states" not in table and "scratch" not in table and "prefixes" not in table and dense.prefixes() == 0


def test_a_draft_window_counts_slots_by_request() -> None:
    [row] = [line for line in lines(pools(ring=64)) if line.startswith("drafter's K/V")]
    # Five run: as many rings, and a padding slot.
    assert row.split()[2:] == ["64", "slots", "128.0", "KiB", "per", "request", "642.0", "KiB"]


def test_a_decoding_server_holds_rows_for_what_is_in_transfer() -> None:
    decoding = {"slots_per_request": 1, "max_states": 8, "in_transfer": 16}
    table = lines(pools(ring=64, replay=True, **decoding))
    rows = {line[:32].strip(): line[32:].split() for line in table}
    assert rows["recurrent states, 1 slots"][-2:] == ["225.1", "MiB"]  # 8 + 16, and a padding slot
    assert rows["verify scratch, block of 4"][-2:] == ["550.0", "KiB"]
    assert rows["drafter's K/V, 64 slots"][-2:] == ["3.1", "MiB"]  # the padding slot has a ring
    assert rows["capped by"] == ["--max-running-requests"]
    assert pools(**decoding | {"max_states": 4}).capped_by == "recurrent states"


def test_without_memory_to_divide_only_sizes_are_shown() -> None:
    table = lines(fit(SIZING, 0))
    assert any(line.endswith("8.0 KiB per token") for line in table)
    assert any(line.endswith("36.0 MiB per request") for line in table)
    assert not any(line.startswith(("together", "requests", "capped")) for line in table)


@pytest.mark.parametrize(
    ("changed", "cap"),
    [
        (pools(max_running=2), "--max-running-requests"),
        (pools(block=8, kept=RequestState(STATE.slot, STATE.snapshots(8))), "verify scratch"),
        (pools(), "recurrent states"),
        (pools(replay=True, max_running=80), "recurrent states"),
        (pools(replay=True, max_running=80, replayed=LONG), "verify scratch"),
        (pools(replay=True, max_tokens=6), "tokens of K/V"),
        (pools(kept=RequestState(), max_tokens=6), "tokens of K/V"),
    ],
)
def test_what_caps_the_requests(changed: Pools, cap: str) -> None:
    assert changed.capped_by == cap
