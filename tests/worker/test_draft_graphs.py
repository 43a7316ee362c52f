"""What the drafter's own graphs read, and what remains of a failed capture; ``tests/rehearsal`` captures real ones."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang_dflash.worker import draft_graphs
from sglang_dflash.worker.draft_graphs import PHASE, DraftGraphs

pytestmark = pytest.mark.sglang

WIDTH, SIZES = 3, [1, 2, 4]


class Backend:
    """In place of SGLang's: a replay reads the memory that the capture read."""

    def __init__(self, fails: Callable[[int], bool] = lambda size: False) -> None:
        self.graphs, self.fails, self.cleaned = dict[int, Any](), fails, False

    def capture_session(self, stream: Any) -> Any:
        return nullcontext()

    def capture_one(self, key: Any, forward: Any) -> None:
        if self.fails(key.size):
            raise RuntimeError("operation not permitted")
        self.graphs[key.size] = forward

    def replay(self, key: Any, forward_batch: Any) -> Any:
        return self.graphs[key.size]()

    def cleanup(self) -> None:
        self.cleaned = True


class Model:
    def forward(self, tokens: Any, positions: Any, batch: Any) -> Any:
        block = tokens, positions, batch.out_cache_loc
        return [each.view(-1, WIDTH).tolist() for each in block] + [
            each.tolist() for each in (batch.req_pool_indices, batch.seq_lens)
        ]


def one_rank(patch: pytest.MonkeyPatch, backend: Backend | None = None, others: tuple[str, ...] = ()) -> Any:
    """Return a drafter; ``others`` are what other ranks' captures raised."""
    group = SimpleNamespace(all_gather_object=lambda own: [own, *others])
    patch.setattr(draft_graphs, "resolve_decode_backend", lambda graphs: backend or Backend())
    patch.setattr(draft_graphs, "get_parallel", lambda: SimpleNamespace(tp_group=group, tp_rank=0))
    patch.setattr(draft_graphs, "get_exec", lambda: SimpleNamespace(graph=SimpleNamespace(enable_cudagraph_gc=True)))
    patch.setattr(draft_graphs, "get_or_create_global_graph_capture_stream", lambda: None)
    patch.setattr(draft_graphs, "graph_capture", lambda stream: nullcontext())
    patch.setattr(draft_graphs, "model_capture_mode", nullcontext)
    free = iter((5.0, 4.0))
    patch.setattr(draft_graphs, "get_available_gpu_memory", lambda *_: next(free))
    translator = SimpleNamespace(bind_runner_slots=lambda batch: None)
    runner = {"device": "cpu", "gpu_id": 0, "model": Model(), "attn_backend": None, "graph_memory_usage": {}}
    return SimpleNamespace(**runner, kv_index_translator=translator)


def a_step(bs: int, width: int, first: int) -> Any:
    """Return a step whose numbers are all different, and none 0."""
    numbers = iter(range(first, first + 10_000))
    tokens, positions, slots = (torch.tensor([next(numbers) for _ in range(bs * width)]) for _ in range(3))
    rows, lengths = (torch.tensor([next(numbers) for _ in range(bs)]) for _ in range(2))
    kv, batch = SimpleNamespace(slots=slots, seq_lens=lengths), SimpleNamespace(req_pool_indices=rows)
    return SimpleNamespace(tokens=tokens.view(bs, width), positions=positions, width=width, draft_kv=kv, batch=batch)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(WIDTH, WIDTH + 2)), min_size=1, max_size=6))
def test_a_graph_reads_the_blocks_of_the_batch_and_padding(steps: list[tuple[int, int]]) -> None:
    """Whatever ran before, rows past the batch have row, slot and length 0: their K/V overwrite no request's."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = DraftGraphs(one_rank(patch), WIDTH, SIZES)
        assert graphs.capture() and graphs.model_runner.graph_memory_usage == {PHASE: 1.0}
        for number, (bs, width) in enumerate(steps):
            step = a_step(bs, width, 1 + 1000 * number)
            *block, rows, lengths = graphs.replay(step)
            size = next(size for size in SIZES if size >= bs)
            given_block = step.tokens, step.positions.view(bs, -1), step.draft_kv.slots.view(bs, -1)
            for found, blocks in zip(block, given_block, strict=True):
                assert found == blocks[:, :WIDTH].tolist() + [[0] * WIDTH] * (size - bs)
            padding = [0] * (size - bs)
            assert (rows, lengths) == (
                step.batch.req_pool_indices.tolist() + padding,
                step.draft_kv.seq_lens.tolist() + padding,
            )


@pytest.mark.parametrize("others", [(), ("out of memory",)], ids=["this rank", "another rank"])
def test_a_failed_capture_warns_once_and_leaves_nothing(
    others: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All ranks stop at the same size, and SGLang's runner captures into another pool."""
    pools, backend = list[Any](), Backend((lambda size: False) if others else (lambda size: size == 2))
    drafter = one_rank(monkeypatch, backend, others)
    monkeypatch.setattr(draft_graphs, "set_global_graph_memory_pool", pools.append)
    with caplog.at_level(logging.WARNING):
        assert not DraftGraphs(drafter, WIDTH, SIZES).capture()
    assert [*backend.graphs] == [4] and backend.cleaned and pools == [None]
    [warning] = caplog.records
    assert (others or ("operation not permitted",))[0] in warning.getMessage()
