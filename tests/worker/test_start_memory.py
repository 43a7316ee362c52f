"""A start with little device memory left: what fits is served, with a warning, as SGLang's own worker does."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.division import sampling as sampling_bytes
from sglang_dflash.worker.start import graphs, prewarm

pytestmark = pytest.mark.sglang

GB = 1 << 30
REQUESTS, BLOCK, VOCAB = 48, 16, 248_320


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(cpu_group=None)
    monkeypatch.setattr(graphs, "get_parallel", lambda: SimpleNamespace(tp_rank=0, tp_size=1, tp_group=group))


@pytest.mark.parametrize(("free", "captured"), [(0.5, False), (1.5, True)])
def test_the_drafter_runs_without_graphs_below_one_gb(
    free: float, captured: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    drafter: Any = SimpleNamespace(device="cuda", gpu_id=0)
    monkeypatch.setattr(graphs, "get_available_gpu_memory", lambda *_, **__: free)
    with caplog.at_level(logging.WARNING):
        assert graphs.drafter_has_room(drafter) is captured
    assert [record.message.count("0.50 GB") for record in caplog.records] == ([] if captured else [1])


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Any:
    """On a device with half a GB free; sampling and an allocation request logits; the graphs hold theirs."""
    free, zeros = GB // 2, torch.zeros

    def allocate(*shape: int, **options: Any) -> torch.Tensor:
        if 4 * shape[0] * shape[1] > free:
            raise torch.OutOfMemoryError
        return zeros(*shape, dtype=options["dtype"])

    monkeypatch.setattr(torch, "zeros", allocate)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    for name in ("reset_peak_memory_stats", "memory_allocated", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: 0)
    sizes = {"max_running_requests": REQUESTS, "model_config": SimpleNamespace(vocab_size=VOCAB)}
    return SimpleNamespace(device="cpu", decode_cuda_graph_runner=object(), **sizes)


def test_a_server_starts_where_greedy_requests_fit_and_sampled_ones_do_not(
    target: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        result = prewarm.prewarm_largest_step(target, BLOCK)
    assert result.sampling_headroom_bytes == sampling_bytes(REQUESTS * BLOCK, VOCAB)
    [record] = caplog.records
    assert "48 requests that all sample in blocks of 16" in record.message and "Fix: " in record.message


def test_a_server_that_has_no_room_for_greedy_requests_is_refused(target: Any) -> None:
    target.decode_cuda_graph_runner = None
    with pytest.raises(DFlashError, match="48 greedy requests"):
        prewarm.prewarm_largest_step(target, BLOCK)
