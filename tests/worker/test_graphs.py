"""Resources of every width fit into memory and are in place during such a step only; ``tests/rehearsal`` runs them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.worker.start import graphs
from sglang_dflash.worker.start.graphs import (
    WidthGraphs,
    reach_past_the_context,
    reason_for_full_width_only,
    shared_indices,
    sizes_for_narrower,
)

pytestmark = pytest.mark.sglang

FULL, WIDTHS = 8, (1, 2, 4, 8)


def runner(attention: str = "fa3", **others: Any) -> Any:
    usual = {
        "attn_backend": "SGLang's own",
        "prefill_attention_backend_str": attention,
        "decode_attention_backend_str": attention,
        "decode_cuda_graph_runner": None,
        "req_to_token_pool": SimpleNamespace(),
        "lora_manager": None,
    }
    return SimpleNamespace(**{**usual, **others})


@pytest.fixture(autouse=True)
def server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8, on one rank."""
    spec = SimpleNamespace(speculative_num_draft_tokens=FULL, override=lambda **_: nullcontext())
    off = SimpleNamespace(overlap=SimpleNamespace(enable_two_batch_overlap=False), enable_pdmux=False, tp_rank=0)
    off.override = lambda **_: nullcontext()
    monkeypatch.setattr(graphs, "get_spec", lambda: spec)
    for name in ("get_exec", "get_disagg", "get_parallel"):
        monkeypatch.setattr(graphs, name, lambda: off)


@pytest.mark.parametrize(
    ("captured", "rooms", "provided", "served"),
    [
        (True, 3, [1, 4, 2], (1, 2, 4, 8)),
        (True, 2, [1, 4], (1, 4, 8)),
        (True, 0, [], (8,)),
        (False, 0, [1, 4, 2], (1, 2, 4, 8)),
    ],
    ids=["room for all", "room for two", "no room", "no graphs"],
)
def test_plain_decoding_comes_first_then_the_widest_that_fit(
    captured: bool, rooms: int, provided: list[int], served: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    width_graphs, found = WidthGraphs(runner(), runner(), None, FULL), list[int]()
    width_graphs._captured = captured
    monkeypatch.setattr(width_graphs, "_has_room", lambda: len(found) < rooms)
    monkeypatch.setattr(width_graphs, "_build_width", found.append)
    assert width_graphs.build(WIDTHS) == served
    assert found == provided


# SGLang's default for 48 requests.
SIZES = [*range(1, 9), *range(10, 33, 2), 40, 48]


@pytest.mark.parametrize(
    ("captured", "kept"),
    [
        (SIZES, [1, 2, 4, 8, 16, 24, 32, 48]),
        ([*SIZES, *range(56, 201, 8)], [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 200]),
        ([1, 2, 3, 4], [1, 2, 4]),
        ([3], [3]),
        ([5, 10], [5, 10]),
        ([1, 2, 50], [1, 2, 50]),
    ],
)
def test_narrower_widths_have_graphs_of_few_batch_sizes(captured: list[int], kept: list[int]) -> None:
    assert sizes_for_narrower(captured) == kept


@pytest.mark.parametrize(
    ("attention", "again"),
    [("fa3", True), ("fa4", True), ("trtllm_mha", True), ("triton", False), ("flashinfer", False)],
)
def test_a_backend_that_has_the_servers_width_is_built_for_every_other_one(
    attention: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without graphs; in them every backend's buffers have one width."""
    target, drafter, built = runner(attention), runner(attention), list[tuple[int, bool]]()
    width_graphs = WidthGraphs(target, drafter, None, FULL // 2)
    monkeypatch.setattr(width_graphs, "_build_runner", lambda of, width, phase: built.append((width, of is drafter)))
    for name in ("draft_pp_context", "draft_tp_context"):
        monkeypatch.setattr(graphs, name, lambda *_: nullcontext())
    width_graphs.build(WIDTHS)
    # The drafter has its own for the most that it drafts.
    assert built == ([(1, False), (4, False), (2, False), (2, True)] if again else [])


@pytest.mark.parametrize(
    ("held", "window", "shared"),
    [
        (torch.zeros(4), None, True),  # Triton's
        ([torch.zeros(4)], None, True),  # FlashInfer's
        (torch.zeros(4), 32, False),
        ([torch.zeros(4)] * 2, None, False),
        (None, None, False),
    ],
)
def test_all_graphs_list_slots_in_the_widest_ones_buffer(held: Any, window: int | None, shared: bool) -> None:
    widest = SimpleNamespace(cuda_graph_kv_indices=held, sliding_window_size=window)
    asked = dict[str, Any]()
    full = SimpleNamespace(init_cuda_graph_state=lambda bs, tokens, **given: asked.update(given))
    full.cuda_graph_custom_mask = torch.zeros(4)
    for backend in (full, SimpleNamespace(full_attn_backend=full)):
        asked.clear()
        with shared_indices(backend, SimpleNamespace(full_attn_backend=widest)):
            full.init_cuda_graph_state(2, 8)
        assert set(asked) == ({"kv_indices_buf"} if shared else set())
        assert not shared or asked["kv_indices_buf"] is (held[0] if isinstance(held, list) else held)
    assert full.cuda_graph_custom_mask is None


@pytest.mark.parametrize("attention", ["fa3", "fa4", "trtllm_mha", "flashinfer", "triton"])
def test_page_tables_reach_to_the_end_of_a_block_past_the_context(attention: str) -> None:
    """FlashInfer and Triton read the slot table, which does."""
    one = runner(attention, model_config=SimpleNamespace(context_len=96))
    built = reach_past_the_context(lambda model_runner: model_runner.model_config.context_len, model_runner=one)
    assert built == (96 if attention in ("flashinfer", "triton") else 96 + FULL)
    assert one.model_config.context_len == 96


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({}, None),
        ({"attention": "flashinfer"}, None),
        ({"attention": "aiter"}, "attention backend aiter"),
        ({"lora_manager": object()}, "LoRA"),
    ],
)
def test_servers_that_can_take_one_width_only_say_why(options: dict[str, Any], reason: str | None) -> None:
    target, drafter = runner(**options), runner()
    assert (reason or "None") in str(reason_for_full_width_only(target, (target, drafter)))
    assert (WidthGraphs(target, drafter, None, FULL).build((FULL,))) == (FULL,)
    if reason:
        assert WidthGraphs(target, drafter, None, FULL).build(WIDTHS) == (FULL,)
