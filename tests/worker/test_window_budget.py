"""A draft window's rings are charged once to the K/V budget, and a prefix hit leaves them enough to prefill."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig

from sglang_dflash.plan.serving import DraftWindow
from sglang_dflash.upstream.worker import ReqToTokenPool
from sglang_dflash.worker import window as hooks
from sglang_dflash.worker.window import DraftRings, charge_rings
from tests.support.configs import serve

pytestmark = pytest.mark.sglang

CONTEXT, REQUESTS, BYTES, PER_TOKEN = 384, 4, 100_000, 10
Division = tuple[int, int | None, int | None]


def divide(configurator: Any, budget_bytes: int, *, cap_tokens: int | None) -> Division:
    """Where SGLang divides the bytes: what it is given, and whether it would add a drafter's part to each token."""
    return budget_bytes, cap_tokens, configurator.spec_aux_config.dflash_draft_num_layers


@pytest.fixture
def configurator() -> Any:
    return SimpleNamespace(
        is_draft_worker=False,
        attn_dp_size=2,
        dflash_draft_cell_size_per_token=PER_TOKEN,
        spec_aux_config=SpecAuxHiddenStateConfig(dflash_draft_num_layers=5),
        model_config=SimpleNamespace(context_len=CONTEXT),
    )


def set_up(window: DraftWindow | None, monkeypatch: pytest.MonkeyPatch, role: str = "null", extra: int = 0) -> None:
    disagg = SimpleNamespace(disaggregation_mode=role, disaggregation_decode_extra_slots=extra or None)
    serve(monkeypatch, window=window)
    monkeypatch.setattr(hooks, "get_disagg", lambda: disagg)
    monkeypatch.setattr(hooks, "get_schedule", lambda: SimpleNamespace(max_running_requests=2 * REQUESTS))


@pytest.mark.parametrize(
    ("tokens", "role", "extra"),
    [(64, "null", 0), (10 * CONTEXT, "null", 0), (64, "prefill", 0), (64, "decode", 8)],
)
def test_the_budget_is_charged_for_the_rings_and_not_for_a_slot_per_token(
    tokens: int, role: str, extra: int, configurator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    window, by_row = DraftWindow(tokens, block=16, page=1), role != "null"
    set_up(window, monkeypatch, role, extra)
    rings = DraftRings(ReqToTokenPool(REQUESTS + extra, CONTEXT + 20, "cpu", False), window, CONTEXT, by_row=by_row)
    charged = (rings.slots + window.page * by_row) * PER_TOKEN
    assert charge_rings(divide, configurator, BYTES) == (BYTES - charged, None, None)
    assert configurator.spec_aux_config.dflash_draft_num_layers == 5
    assert configurator.dflash_draft_cell_size_per_token == PER_TOKEN


@pytest.mark.parametrize(("window", "drafters_layers"), [(DraftWindow(64, block=16, page=1), None), (None, 5)])
def test_rings_that_exist_are_not_charged_again(
    window: DraftWindow | None, drafters_layers: int | None, configurator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang sizes the pool again after graph capture, from what is free beside the rings, and caps it."""
    set_up(window, monkeypatch)
    assert charge_rings(divide, configurator, BYTES, cap_tokens=7) == (BYTES, 7, drafters_layers)
