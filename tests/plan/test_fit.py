"""Sizes by hand for small shapes, the division of memory, and the published pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from sglang_dflash.drafter.config import DrafterConfig, load_config, text_config
from sglang_dflash.drafter.tensors import expected_shapes
from sglang_dflash.hooks.flags import modernise_argv
from sglang_dflash.plan.advice import Advice
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS, asked_about
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.pools import FLOOR, RequestState, Sizing, fit
from sglang_dflash.plan.report import preflight
from sglang_dflash.plan.sizes import StateBytes, draft_kv_per_token, state_bytes, target_kv_per_token, target_parameters
from tests.support.cards import FOLDER, NAMES, card
from tests.support.configs import drafter

HYBRID = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def test_kv_of_the_target_counts_attention_layers_only() -> None:
    assert target_kv_per_token(HYBRID, kv_bytes=2, tp_size=1) == 1 * 2 * 2 * 8 * 2
    assert target_kv_per_token(HYBRID, kv_bytes=2, tp_size=2) == 1 * 2 * 1 * 8 * 2
    assert target_kv_per_token(HYBRID, kv_bytes=2, tp_size=4) == 1 * 2 * 1 * 8 * 2  # copies


def test_kv_of_the_drafter_counts_every_layer() -> None:
    config = DrafterConfig.from_dict(drafter())
    assert draft_kv_per_token(config, kv_bytes=2, tp_size=1) == 2 * 2 * 2 * 16 * 2


def test_recurrent_state_and_its_scratch() -> None:
    state = state_bytes(HYBRID, recurrent_bytes=4, conv_bytes=2, tp_size=1)
    column = (2 * 2 * 8 + 4 * 16) * 2
    assert (state.recurrent, state.conv, state.conv_column) == (3 * 4 * 16 * 8 * 4, 3 * 3 * column, 3 * column)
    # a block of 5: five matrices, and one window of 5 + 4 - 2 columns
    assert state.snapshots(5) == 5 * state.recurrent + 7 * state.conv_column


@pytest.mark.parametrize("conv_bytes", [2, 4])
def test_a_record_is_values_keys_and_decays_of_four_bytes(conv_bytes: int) -> None:
    state = state_bytes(HYBRID, recurrent_bytes=4, conv_bytes=conv_bytes, tp_size=1)
    assert state.record == 3 * 4 * (4 * 16 + 2 * 8 + 4)
    # a ring of 16, and the same window
    assert state.records(5, 16) == 16 * state.record + 7 * state.conv_column
    assert state_bytes(HYBRID, recurrent_bytes=4, conv_bytes=2, tp_size=2).record == state.record // 2


def test_a_dense_target_has_no_state() -> None:
    dense = {"num_hidden_layers": 6}
    assert state_bytes(dense, recurrent_bytes=4, conv_bytes=2, tp_size=1) == StateBytes(0, 0, 0)


DENSE = Sizing(
    target_weights=1000,
    drafter_weights=200,
    target_kv=8,
    draft_kv=2,
    kept=RequestState(),
    replayed=RequestState(),
    block=4,
    slots_per_request=5,
    context=50,
    state_share=1.0,
    max_running=3,
)
STATE = StateBytes(recurrent=90, conv=10, conv_column=5, record=2)
RECURRENT = replace(
    DENSE,
    kept=RequestState(STATE.slot, STATE.snapshots(4)),
    replayed=RequestState(STATE.slot, STATE.records(4, 8), 8 * STATE.record),
)


def test_a_dense_target_gives_the_rest_to_kv() -> None:
    fitted = fit(DENSE, static_bytes=2200)
    assert (fitted.tokens, fitted.running, fitted.bytes["states"], fitted.bytes["scratch"]) == (100, 3, 0, 0)
    assert (fitted.bytes["target_kv"], fitted.bytes["draft_kv"]) == (101 * 8, 101 * 2)  # one padding token


def test_pages_round_down_and_add_a_padding_page() -> None:
    fitted = fit(replace(DENSE, page=16), static_bytes=2200)
    assert fitted.tokens == 96
    assert fitted.bytes["target_kv"] == 112 * 8


def test_recurrent_states_take_their_share_and_bound_the_requests() -> None:
    fitted = fit(RECURRENT, static_bytes=1200 + 10_000)
    # 5,000 bytes: (5,000 - 100 * 5) / (100 * (1 + 4 / 5)) = 25 slots, five a request
    assert (fitted.state_slots, fitted.running) == (25, 3)
    assert fitted.bytes["states"] == 26 * 100
    assert fitted.bytes["scratch"] == 4 * STATE.snapshots(4)
    assert fitted.tokens == (10_000 - 100 * (4 * 4 + 26)) // 10


def test_fewer_requests_run_where_states_are_scarce() -> None:
    assert fit(replace(RECURRENT, max_running=100), static_bytes=1200 + 10_000).running == 5
    assert fit(replace(RECURRENT, max_states=10), static_bytes=1200 + 10_000).running == 2


def test_replayed_states_take_the_block_out_of_the_division() -> None:
    fitted = fit(RECURRENT, static_bytes=1200 + 10_000, replay=True)
    # windows of 10 + 3 * 5 bytes and records of 8 * 2 for three requests and a row of padding
    windows, records = 4 * 25, 4 * 16
    # half of 9,900 bytes: (4,950 - 64 - 100) / 100 slots
    assert (fitted.state_slots, fitted.running) == (47, 3)
    assert (fitted.bytes["states"], fitted.bytes["scratch"]) == (48 * 100, windows + records)
    assert fitted.tokens == (10_000 - windows - records - 48 * 100) // 10


def test_replayed_states_keep_scratch_for_every_request_asked_for() -> None:
    """Of 100 requests 6 find states; 101 rows of scratch are set aside all the same, 7 allocated."""
    fitted = fit(replace(RECURRENT, max_running=100), static_bytes=1200 + 10_000, replay=True)
    slots = int((10_000 - 101 * 25) / 2 - 101 * 16 - 100) // 100
    assert (fitted.state_slots, fitted.running) == (slots, slots // 5)
    assert fitted.bytes["scratch"] == (slots // 5 + 1) * (25 + 16)
    assert fitted.tokens == (10_000 - 101 * (25 + 16) - (slots + 1) * 100) // 10


def test_a_replay_keeps_states_in_its_own_dtype() -> None:
    wide = replace(RECURRENT.replayed, slot=200)
    fitted = fit(replace(RECURRENT, replayed=wide, max_states=10), static_bytes=1200 + 10_000, replay=True)
    assert fitted.bytes["states"] == 11 * 200
    assert fit(replace(RECURRENT, replayed=wide, max_states=10), static_bytes=1200 + 10_000).bytes["states"] == 11 * 100


def test_limits_of_the_user_hold() -> None:
    assert fit(replace(DENSE, max_tokens=40), static_bytes=2200).tokens == 40


def test_weights_that_do_not_fit_leave_nothing() -> None:
    fitted = fit(RECURRENT, static_bytes=1000)
    assert (fitted.tokens, fitted.running) == (0, 0)


# Parameters as the publishers state them.
PUBLISHED = {
    "Qwen3-Coder-Next": (80e9, 0.5e9),
    "Qwen3.5-27B": (27e9, 2e9),
    "Qwen3.5-4B": (4.5e9, 0.63e9),
    "Qwen3.6-27B": (27e9, 2e9),
    "Qwen3.6-35B-A3B": (35e9, 0.5e9),
}


@pytest.mark.parametrize("name", NAMES)
def test_the_published_pairs_have_their_published_sizes(name: str) -> None:
    target, own = PUBLISHED[name]
    assert target_parameters(load_config(FOLDER / name / "target")) == pytest.approx(target, rel=0.02)
    shapes = expected_shapes(DrafterConfig.load(FOLDER / name / "drafter"))
    assert sum(map(math.prod, shapes.values())) == pytest.approx(own, rel=0.15)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_pairs_are_measured_against_a_device(name: str) -> None:
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}
    args = parse(modernise_argv(card(name).arguments_for(*pair.values()))[0], **pair)[0]
    report = preflight(args, asked_about(None, memory_gib=268))  # a B300: the coder needs 149 for weights
    assert [finding for finding in report.findings if finding.level == "error"] == []
    assert report.memory is not None
    text = text_config(load_config(FOLDER / name / "target"))
    demand, ways = report.memory.served.sizing, [report.memory.served, report.memory.other]
    assert demand.target_kv == text["layer_types"].count("full_attention") * 2 * text["num_key_value_heads"] * 256 * 2
    assert ways[0].running > 0 and ways[1] is not None
    for each in filter(None, ways):
        assert sum(each.bytes.values()) <= report.memory.static_bytes + demand.page * (
            demand.target_kv + demand.draft_kv
        )


CONTEXT = 262_144  # tokens of the longest request of each card's target

# Requests at once of 48 asked for, on 141 GiB as most cards start: states kept, replayed, replayed with a better share.
AT_ONCE = {
    "Qwen3-Coder-Next": (18, 48, 48),  # on two GPUs
    "Qwen3.5-27B": (7, 31, 35),
    "Qwen3.5-4B": (44, 48, 48),
    "Qwen3.6-27B": (7, 31, 35),
    "Qwen3.6-35B-A3B": (14, 48, 48),
}


@pytest.mark.parametrize("name", NAMES)
def test_more_requests_run_where_states_are_replayed(name: str) -> None:
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}
    flags = "--mem-fraction-static 0.75 --speculative-num-draft-tokens 16 --mamba-radix-cache-strategy extra_buffer"
    args = parse([*flags.split(), "--tp-size", "2" if "Coder" in name else "1"], **pair)[0]
    memory = preflight(args, asked_about(None, memory_gib=141)).memory
    assert memory is not None
    static, sglangs = memory.static_bytes, replace(memory.served.sizing, state_share=0.9)
    fits = (fit(sglangs, static), fit(sglangs, static, replay=True), memory.served)
    assert tuple(each.running for each in fits) == AT_ONCE[name]
    assert memory.served.replay and memory.other == fits[0]
    assert memory.served.tokens >= min(CONTEXT, fits[1].tokens)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", GPUS)
def test_the_default_split_holds_a_whole_context_and_one_fraction_serves_every_request(name: str, gpu: str) -> None:
    """The K/V are no fewer than at SGLang's ratio; the fraction that is advised gives the numbers that it names."""
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}

    def checked(*flags: str) -> tuple[MemoryTable, Sequence[Advice]]:
        report = preflight(parse([*own_backends, *flags], **pair)[0], GPUS[gpu])
        assert report.memory is not None
        return report.memory, report.advice

    backends = ("--attention-backend", "trtllm_mha" if gpu == "b200" else "fa3")
    own_backends = [
        *modernise_argv(card(name).arguments_for(*pair.values()))[0],
        *backends,
        "--speculative-draft-attention-backend",
        backends[1],
    ]
    memory, advised = checked()
    served = memory.served
    sglangs = fit(replace(memory.served.sizing, state_share=0.9), memory.static_bytes, replay=served.replay)
    assert served.tokens >= min(CONTEXT, sglangs.tokens) and served.running >= sglangs.running
    for advice in advised:
        if advice.flag.startswith("--mem-fraction-static"):
            wider, _ = checked(*advice.flag.split())
            assert (wider.served.running, wider.served.tokens) == (advice.running, advice.tokens)
            assert wider.headroom is not None and wider.headroom.left >= FLOOR


def test_a_27b_pair_keeps_two_gibibytes_of_scratch_a_request_or_replays_41_mebibytes() -> None:
    """48 linear layers; 48 value heads and 16 key heads of 128; windows of 10,240 bfloat16 inputs, 3 before a block."""
    text = text_config(load_config(FOLDER / "Qwen3.5-27B" / "target"))
    state = state_bytes(text, recurrent_bytes=4, conv_bytes=2, tp_size=1)
    matrices, record, windows = 48 * 128 * 128 * 4, (48 * 128 + 16 * 128 + 48) * 4, (3 + 15) * 10_240 * 2
    assert state.recurrent == 48 * matrices
    assert 48 * 16 * matrices == 2.25 * (1 << 30)
    assert state.snapshots(16) == 48 * (16 * matrices + windows)
    assert state.records(16, 16) == 48 * (16 * record + windows) == pytest.approx(41.0 * (1 << 20), rel=0.001)


def test_rings_replace_the_drafters_slot_per_token() -> None:
    fitted = fit(replace(DENSE, ring=7), static_bytes=2200)
    assert fitted.tokens == (1000 - 3 * 7 * 2) // 8
    assert fitted.bytes["draft_kv"] == (3 * 7 + 1) * 2  # one padding token
