"""Buffers that all widths share, and page tables that reach as far as a block; ``tests/rehearsal`` runs both."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.worker.start import graphs
from sglang_dflash.worker.start.graphs import reach_past_the_context, shared_indices

pytestmark = pytest.mark.sglang

FULL = 8


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
def test_page_tables_reach_to_the_end_of_a_block_past_the_context(
    attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashInfer and Triton read the slot table, which does."""
    monkeypatch.setattr(graphs, "get_spec", lambda: SimpleNamespace(speculative_num_draft_tokens=FULL))
    names = dict.fromkeys(("prefill_attention_backend_str", "decode_attention_backend_str"), attention)
    one = SimpleNamespace(**names, model_config=SimpleNamespace(context_len=96))
    built = reach_past_the_context(lambda model_runner: model_runner.model_config.context_len, model_runner=one)
    assert built == (96 if attention in ("flashinfer", "triton") else 96 + FULL)
    assert one.model_config.context_len == 96
