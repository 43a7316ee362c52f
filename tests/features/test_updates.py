"""Versions of the tokens of a step that was launched before an update of the weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.utils.weight_versions import compute_weight_version_spans, record_weight_version_events

from sglang_dflash.features import weight_updates

pytestmark = pytest.mark.sglang


def test_a_quantised_drafter_is_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers hold their weights as the kernels need them, and a session would convert them again."""
    opened = list[str]()
    monkeypatch.setattr(
        weight_updates.SchedulerWeightUpdaterManager,
        "begin_weight_update",
        lambda _, request: opened.append(request.selector),
    )
    manager: Any = weight_updates.Updates.__new__(weight_updates.Updates)
    runners = {role: SimpleNamespace(model_config=SimpleNamespace(quantization="fp8")) for role in ("target", "draft")}
    manager.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runners["target"])])
    manager.draft_worker = SimpleNamespace(weight_update_runners=lambda: [("draft", runners["draft"])])
    for selector in ("target", "all", "draft"):
        answer = manager.begin_weight_update(SimpleNamespace(selector=selector))
    assert opened == ["target", "all"] and not answer.success and "quantised (fp8)" in answer.message
    runners["draft"].model_config.quantization = None
    manager.begin_weight_update(SimpleNamespace(selector="draft"))
    assert opened[-1] == "draft"


@pytest.mark.parametrize(
    ("tokens", "lens", "chunks", "expected"),
    [
        (5, [4], 0, [("1", 9), ("3", 20)]),
        (0, None, 0, [("1", 1), ("3", 20)]),  # a prefill
        (5, None, 0, [("1", 6), ("3", 20)]),  # a request that decodes in the batch of a prefill
        (0, None, 1, [("3", 20)]),  # a chunk of a prompt commits nothing
    ],
)
def test_a_launched_step_has_the_old_version(
    tokens: int, lens: list[int] | None, chunks: int, expected: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two updates over the step, of a request with ``tokens``."""
    serving = SimpleNamespace(weight_version="1")
    monkeypatch.setattr(weight_updates, "get_serving", lambda: serving)
    req: Any = SimpleNamespace(
        output_ids=[7] * tokens, weight_version_events=[], inflight_middle_chunks=chunks, finished=lambda: False
    )
    accept_lens = None if lens is None else torch.tensor(lens)
    result = SimpleNamespace(copy_done=SimpleNamespace(synchronize=lambda: None), accept_lens=accept_lens)
    scheduler = SimpleNamespace(enable_overlap=True, result_queue=[(SimpleNamespace(reqs=[req]), result)])

    def record(_: Any, new: str) -> None:
        record_weight_version_events([req], serving.weight_version)
        serving.weight_version = new

    for version in "23":
        weight_updates.label_launched_tokens(record, scheduler, version)
    spans = compute_weight_version_spans(req.weight_version_events, "3", 20)
    assert [(span.version, span.end) for span in spans] == expected
