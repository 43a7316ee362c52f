"""Tensors by IPC are checked as those of other updates, load by load."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.features import weights
from sglang_dflash_lab.pairs import target_path
from tests.support.configs import serve

pytestmark = pytest.mark.sglang

Tensors = list[tuple[str, torch.Tensor]]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.zeros(4))

    def load_weights(self, tensors: Tensors) -> None:
        for name, tensor in tensors:
            if name == "norm":
                self.norm.data.copy_(tensor)


def update(loads: list[Tensors], model: Model, monkeypatch: pytest.MonkeyPatch) -> tuple[bool, str]:
    """SGLang's own update, with a stand-in for ``checkpoint_engine``, which is not installed and needs a GPU."""
    from sglang.srt.model_executor.model_runner_components import weight_updater

    def receive(*_: Any, run: Callable[[Tensors], None], **__: Any) -> None:
        for tensors in loads:
            run(tensors)

    worker: Any = ModuleType("checkpoint_engine.worker")
    worker.update_weights_from_ipc = None
    monkeypatch.setitem(sys.modules, "checkpoint_engine", ModuleType("checkpoint_engine"))
    monkeypatch.setitem(sys.modules, "checkpoint_engine.worker", worker)
    from sglang.srt.checkpoint_engine import checkpoint_engine_worker as extension

    monkeypatch.setattr(extension, "update_weights_from_ipc", receive)
    for name, answer in (("get_device_uuid", "GPU-0"), ("get_device_id", 0), ("get_post_hook", None)):
        monkeypatch.setattr(extension.SGLangCheckpointEngineWorkerExtensionImpl, name, lambda *_, answer=answer: answer)
    monkeypatch.setattr(weight_updater, "_unsupported_derived_weight_cache_error", lambda *_: None)
    arguments = SimpleNamespace(model_path=str(target_path("tiny-dense")), revision=None)
    monkeypatch.setattr(weights, "get_server_args", lambda: arguments)
    monkeypatch.setattr(weights, "get_parallel", lambda: SimpleNamespace(moe_ep_size=1))
    config = SimpleNamespace(model_path="target", is_draft_model=False)
    kept = {"get_model": lambda: model, "get_model_runner": lambda: SimpleNamespace(model=model)}
    updater: Any = SimpleNamespace(model_config=config, _assert_weight_cache_inactive=lambda _: None, **kept)
    request = SimpleNamespace(zmq_handles={"GPU-0": "socket"})
    result: tuple[bool, str] = weights.update_wholly(
        weight_updater.WeightUpdater.update_weights_from_ipc, updater, request
    )
    return result


def test_tensors_by_ipc_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch)
    model = Model()
    ones, fc = ("norm", torch.ones(4)), ("fc.weight", torch.ones(2))
    tied = ("lm_head.weight", torch.ones(2))
    assert update([[ones], [tied]], model, monkeypatch)[0] and model.norm.eq(1).all()
    for refused in ([("norm", torch.zeros(5))], [("norm", torch.zeros(4)), fc], [fc]):
        success, message = update([refused], model, monkeypatch)
        assert not success and "nothing was written" in message and refused[-1][0] in message
        assert model.norm.eq(1).all()
