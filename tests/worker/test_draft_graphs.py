"""What the drafter's graphs read; ``tests/rehearsal`` captures and replays them."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_dflash.worker import forwards
from sglang_dflash.worker.draft_graphs import INPUTS, DraftGraphs
from sglang_dflash.worker.forwards import Draft

pytestmark = pytest.mark.sglang

WIDTH, SIZES = 3, (1, 2, 4)


class Backend:
    """In place of SGLang's: a replay reads the memory that the capture read."""

    def __init__(self) -> None:
        self.batches = dict[int, Any]()

    def replay(self, key: Any, forward_batch: Any) -> Any:
        batch = self.batches[key.size]
        return [getattr(batch, name).view(key.size, -1).tolist() for name in INPUTS]


def capturing(patch: pytest.MonkeyPatch) -> DraftGraphs:
    """Return graphs before their capture, on one rank."""

    def capture(graphs: Any) -> None:
        graphs.backend.batches = {size: graphs.capture_prepare(size)[0] for size in SIZES}

    patch.setattr(DecodeCudaGraphRunner, "capture", capture)
    patch.setattr(DecodeCudaGraphRunner, "capture_prepare", lambda graphs, size: (SimpleNamespace(), None, None))
    graphs: Any = DraftGraphs.__new__(DraftGraphs)
    graphs.max_bs, graphs.captured_req_width, graphs.device, graphs.backend = max(SIZES), WIDTH, "cpu", Backend()
    translator = SimpleNamespace(bind_runner_slots=lambda batch: None)
    graphs.model_runner = SimpleNamespace(kv_index_translator=translator)
    return graphs


def a_step(bs: int, width: int, first: int) -> Any:
    """Return a step whose numbers are all different, and none 0."""
    block = torch.arange(first, first + 3 * bs * width).view(3, bs, width)
    rows, lengths = torch.arange(first + 500, first + 500 + 2 * bs).view(2, bs)
    kv, batch = SimpleNamespace(slots=block[2].flatten(), seq_lens=lengths), SimpleNamespace(req_pool_indices=rows)
    return SimpleNamespace(tokens=block[0], positions=block[1].flatten(), width=width, draft_kv=kv, batch=batch)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(WIDTH, WIDTH + 2)), min_size=1, max_size=6))
def test_a_graph_reads_the_blocks_of_the_batch_and_padding(steps: list[tuple[int, int]]) -> None:
    """Rows past the batch have row, slot and length 0 after a larger batch too: their K/V overwrite no request's."""
    with pytest.MonkeyPatch.context() as patch:
        graphs = capturing(patch)
        graphs.capture()
        for number, (bs, width) in enumerate(steps):
            step, size = a_step(bs, width, 1 + 1000 * number), next(size for size in SIZES if size >= bs)
            blocks = step.tokens, step.positions.view(bs, -1), step.draft_kv.slots.view(bs, -1)
            per_request = step.batch.req_pool_indices[:, None], step.draft_kv.seq_lens[:, None]
            found: Any = graphs.replay(step, size)
            for name, values, given_values in zip(INPUTS, found, (*blocks, *per_request), strict=True):
                real = given_values[:, :WIDTH].tolist()
                assert values == real + [[0] * len(real[0])] * (size - bs), name


@pytest.mark.parametrize(("runs", "rows"), [(True, 4), (False, 3)])
def test_an_eager_draft_injects_its_own_rows_only(runs: bool, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three requests, where graphs of SGLang's runner would pad to four: it may decline a batch."""
    runner: Any = DecodeCudaGraphRunner.__new__(DecodeCudaGraphRunner)
    runner.capture_bs, runner.can_run_graph = SIZES, lambda batch: runs
    draft: Any = Draft.__new__(Draft)
    waiting, output = list[int](), SimpleNamespace(logits_output=None)
    draft._drafter = SimpleNamespace(decode_cuda_graph_runner=runner, forward=lambda batch: output)
    draft._width, draft._batches, draft._ranks = WIDTH, lambda *_: None, None
    draft._inject = SimpleNamespace(before_draft=waiting.append)
    monkeypatch.setattr(forwards, "draft_tp_context", lambda ranks: nullcontext())
    draft._forward(a_step(3, WIDTH, 1))
    assert waiting == [rows * WIDTH]
