"""The K/V budget under a draft window: rings are charged once, a token of the pool holds no drafter K/V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import SpecAuxHiddenStateConfig

from sglang_dflash.upstream import ReqToTokenPool
from sglang_dflash.window import hooks
from sglang_dflash.window.hooks import charge_rings
from sglang_dflash.window.rings import DraftRings
from sglang_dflash.window.size import DraftWindow
from tests.support.plan import serve

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
        dflash_draft_cell_size_per_token=PER_TOKEN,
        spec_aux_config=SpecAuxHiddenStateConfig(dflash_draft_num_layers=5),
        model_config=SimpleNamespace(context_len=CONTEXT),
    )


def set_up(window: DraftWindow | None, monkeypatch: pytest.MonkeyPatch, role: str = "null", extra: int = 0) -> None:
    disagg = SimpleNamespace(disaggregation_mode=role, disaggregation_decode_extra_slots=extra or None)
    serve(monkeypatch, window=window)
    monkeypatch.setattr(hooks, "get_disagg", lambda: disagg)
    monkeypatch.setattr(hooks, "get_schedule", lambda: SimpleNamespace(max_running_requests=REQUESTS))


@pytest.mark.parametrize("tokens", [64, 10 * CONTEXT])
def test_the_budget_is_charged_for_the_rings_and_not_for_a_slot_per_token(
    tokens: int, configurator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = DraftWindow(tokens, block=16, page=1)
    set_up(window, monkeypatch)
    rings = DraftRings(ReqToTokenPool(REQUESTS, CONTEXT + 20, "cpu", False), window, CONTEXT)
    assert charge_rings(divide, configurator, BYTES) == (BYTES - rings.slots * PER_TOKEN, None, None)
    assert configurator.spec_aux_config.dflash_draft_num_layers == 5
    assert configurator.dflash_draft_cell_size_per_token == PER_TOKEN


@pytest.mark.parametrize(("role", "extra"), [("prefill", 0), ("decode", 8)])
def test_a_disaggregated_server_is_charged_for_every_row(
    role: str, extra: int, configurator: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = DraftWindow(64, block=16, page=1)
    set_up(window, monkeypatch, role, extra)
    pool = ReqToTokenPool(REQUESTS + extra, CONTEXT + 20, "cpu", False)
    rings = DraftRings(pool, window, CONTEXT, by_row=True)
    charged = BYTES - charge_rings(divide, configurator, BYTES)[0]
    assert charged == (rings.slots + window.page) * PER_TOKEN


def test_rings_that_exist_are_not_charged_again(configurator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang sizes the pool again after graph capture, from what is free beside the rings, and caps it."""
    set_up(DraftWindow(64, block=16, page=1), monkeypatch)
    assert charge_rings(divide, configurator, BYTES, cap_tokens=7) == (BYTES, 7, None)


def test_without_a_window_the_budget_is_sglangs(configurator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    set_up(None, monkeypatch)
    assert charge_rings(divide, configurator, BYTES, cap_tokens=7) == (BYTES, 7, 5)
