"""One answer to "does our worker serve here": the one that SGLang was given when it asked for the class."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_dflash.drafter import served
from sglang_dflash.hooks import server_info, takeover
from sglang_dflash.hooks.requests import refuse_request
from sglang_dflash.hooks.server_info import SERVER_INFO_KEY
from sglang_dflash.upstream import SpeculativeAlgorithm
from sglang_dflash.window.served import served_window


def choose(monkeypatch: pytest.MonkeyPatch, reason: str | None) -> type:
    monkeypatch.setattr(served, "_our_worker_serves", False)
    monkeypatch.setattr(takeover, "reason_for_builtin", lambda _: reason)
    return takeover.choose_worker(lambda *_: int, SpeculativeAlgorithm.DFLASH, SimpleNamespace())


def answers() -> tuple[str | None, bool]:
    request = SimpleNamespace(return_hidden_states=True, return_sampling_mask=False)
    refusal = refuse_request(lambda *_: "SGLang's own answer", request, True)
    result: Any = SimpleNamespace(internal_state={})
    worker = SimpleNamespace(server_info=lambda: {})
    server_info.report_worker(result, SimpleNamespace(draft_worker=worker))
    return refusal, SERVER_INFO_KEY in result.internal_state


def test_every_hook_steps_aside_for_sglangs_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even in a process that has imported ours."""
    from sglang_dflash.worker.worker import DFlashWorker

    assert choose(monkeypatch, "DP attention is used") is int
    assert answers() == ("SGLang's own answer", False)
    assert served_window() is None
    assert choose(monkeypatch, None) is DFlashWorker
    refusal, shown = answers()
    assert "return_hidden_states is not available" in str(refusal)
    assert shown
