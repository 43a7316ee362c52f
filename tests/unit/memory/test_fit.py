"""Sizes by hand for small shapes, the division of memory, and the published pairs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sglang_dflash.check.options import parse
from sglang_dflash.check.preflight import preflight
from sglang_dflash.drafter.config import DrafterConfig, load_config, text_config
from sglang_dflash.memory.fit import Demand, fit
from sglang_dflash.memory.machine import asked_about
from sglang_dflash.memory.parameters import drafter_parameters, target_parameters
from sglang_dflash.memory.sizes import StateBytes, draft_kv_per_token, state_bytes, target_kv_per_token
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
    assert state == StateBytes(recurrent=3 * 4 * 16 * 8 * 4, conv=3 * 3 * column, conv_column=3 * column)
    # a block of 5: five matrices, and one window of 5 + 4 - 2 columns
    assert state.scratch(5) == 5 * state.recurrent + 7 * state.conv_column


def test_a_dense_target_has_no_state() -> None:
    dense = {"num_hidden_layers": 6}
    assert state_bytes(dense, recurrent_bytes=4, conv_bytes=2, tp_size=1) == StateBytes(0, 0, 0)


DENSE = Demand(
    target_weights=1000,
    drafter_weights=200,
    target_kv=8,
    draft_kv=2,
    state=StateBytes(0, 0, 0),
    block=4,
    slots_per_request=5,
    state_share=1.0,
    max_running=3,
)
RECURRENT = replace(DENSE, state=StateBytes(recurrent=90, conv=10, conv_column=5))


def test_a_dense_target_gives_the_rest_to_kv() -> None:
    fitted = fit(DENSE, static_bytes=2200)
    assert (fitted.tokens, fitted.running, fitted.states, fitted.scratch) == (100, 3, 0, 0)
    assert (fitted.target_kv, fitted.draft_kv) == (101 * 8, 101 * 2)  # one padding token


def test_pages_round_down_and_add_a_padding_page() -> None:
    fitted = fit(replace(DENSE, page=16), static_bytes=2200)
    assert fitted.tokens == 96
    assert fitted.target_kv == 112 * 8


def test_recurrent_states_take_their_share_and_bound_the_requests() -> None:
    fitted = fit(RECURRENT, static_bytes=1200 + 10_000)
    # 5,000 bytes: (5,000 - 100 * 5) / (100 * (1 + 4 / 5)) = 25 slots, five a request
    assert (fitted.state_slots, fitted.running) == (25, 3)
    assert fitted.states == 26 * 100
    assert fitted.scratch == 4 * RECURRENT.state.scratch(4)
    assert fitted.tokens == (10_000 - 100 * (4 * 4 + 26)) // 10


def test_fewer_requests_run_where_states_are_scarce() -> None:
    assert fit(replace(RECURRENT, max_running=100), static_bytes=1200 + 10_000).running == 5
    assert fit(replace(RECURRENT, max_states=10), static_bytes=1200 + 10_000).running == 2


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
    assert drafter_parameters(DrafterConfig.load(FOLDER / name / "drafter")) == pytest.approx(own, rel=0.15)


@pytest.mark.parametrize("name", NAMES)
def test_the_published_pairs_are_measured_against_a_device(name: str) -> None:
    pair = {"target": str(FOLDER / name / "target"), "drafter": str(FOLDER / name / "drafter")}
    args = parse(card(name).arguments, **pair)[0]
    report = preflight(args, asked_about(None, memory_gib=268))  # a B300: the coder needs 149 for weights
    assert [finding for finding in report.findings if finding.level == "error"] == []
    assert report.memory is not None
    text = text_config(load_config(FOLDER / name / "target"))
    demand, fitted = report.memory.demand, report.memory.fit
    assert demand.target_kv == text["layer_types"].count("full_attention") * 2 * text["num_key_value_heads"] * 256 * 2
    assert fitted.running > 0
    together = fitted.weights + fitted.target_kv + fitted.draft_kv + fitted.states + fitted.scratch
    assert together <= report.memory.static_bytes + demand.page * (demand.target_kv + demand.draft_kv)


def test_a_27b_pair_keeps_two_gibibytes_of_scratch_a_request() -> None:
    """48 layers x 16 positions x 48 heads x 128 x 128 float32 values, and the convolution's windows."""
    text = text_config(load_config(FOLDER / "Qwen3.5-27B" / "target"))
    state = state_bytes(text, recurrent_bytes=4, conv_bytes=2, tp_size=1)
    assert state.recurrent == 48 * 48 * 128 * 128 * 4
    assert state.scratch(16) == pytest.approx(2.27 * (1 << 30), rel=0.01)


def test_rings_replace_the_drafters_slot_per_token() -> None:
    fitted = fit(replace(DENSE, ring=7), static_bytes=2200)
    assert fitted.tokens == (1000 - 3 * 7 * 2) // 8
    assert fitted.draft_kv == (3 * 7 + 1) * 2  # one padding token
