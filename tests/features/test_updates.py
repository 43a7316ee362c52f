"""Tensors by IPC are checked as those of other updates, load by load; a checkpoint is read twice, not listed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, ref

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.features.updates import writes
from sglang_dflash_lab.pairs import target_path

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
    monkeypatch.setattr(writes, "get_server_args", lambda: arguments)
    monkeypatch.setattr(writes, "get_parallel", lambda: SimpleNamespace(moe_ep_size=1))
    config = SimpleNamespace(model_path="target", is_draft_model=False)
    kept = {"get_model": lambda: model, "get_model_runner": lambda: SimpleNamespace(model=model)}
    updater: Any = SimpleNamespace(model_config=config, _assert_weight_cache_inactive=lambda _: None, **kept)
    updater.update_weights_from_ipc = MethodType(weight_updater.WeightUpdater.update_weights_from_ipc, updater)
    result: tuple[bool, str] = writes.WholeUpdater(updater).update_weights_from_ipc(
        SimpleNamespace(zmq_handles={"GPU-0": "socket"})
    )
    return result


def test_tensors_by_ipc_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    ones, fc = ("norm", torch.ones(4)), ("fc.weight", torch.ones(2))
    tied = ("lm_head.weight", torch.ones(2))
    assert update([[ones], [tied]], model, monkeypatch)[0] and model.norm.eq(1).all()
    for refused in ([("norm", torch.zeros(5))], [("norm", torch.zeros(4)), fc], [fc]):
        success, message = update([refused], model, monkeypatch)
        assert not success and "nothing was written" in message and refused[-1][0] in message
        assert model.norm.eq(1).all()


def test_a_quantised_drafter_is_not_updated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers hold their weights as the kernels need them, and a session would convert them again."""
    opened = list[str]()
    monkeypatch.setattr(
        writes.SchedulerWeightUpdaterManager, "begin_weight_update", lambda _, request: opened.append(request.selector)
    )
    manager: Any = writes.Updates.__new__(writes.Updates)
    runners = {role: SimpleNamespace(model_config=SimpleNamespace(quantization="fp8")) for role in ("target", "draft")}
    manager.tp_worker = SimpleNamespace(weight_update_runners=lambda: [("target", runners["target"])])
    manager.draft_worker = SimpleNamespace(weight_update_runners=lambda: [("draft", runners["draft"])])
    for selector in ("target", "all", "draft"):
        answer = manager.begin_weight_update(SimpleNamespace(selector=selector))
    assert opened == ["target", "all"] and not answer.success and "quantised (fp8)" in answer.message
    runners["draft"].model_config.quantization = None
    manager.begin_weight_update(SimpleNamespace(selector="draft"))
    assert opened[-1] == "draft"


def test_a_checkpoint_is_read_twice_and_never_listed(tmp_path: Path) -> None:
    """As pickled files, whose tensors PyTorch builds by writes; no written tensor comes from the first reading."""
    from sglang.srt.model_loader.weight_utils import pt_weights_iterator

    files = [str(tmp_path / f"{number}.bin") for number in range(4)]
    for number, file in enumerate(files):
        torch.save({f"norm.{number}": torch.full((4,), float(number))}, file)
    norms = {f"norm.{number}": torch.nn.Parameter(torch.zeros(4)) for number in range(4)}
    read, most = list[ReferenceType[torch.Tensor]](), 0

    def load(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        nonlocal most
        for name, tensor in tensors:
            norms[name].data.copy_(tensor)
            read.append(ref(tensor))
            most = max(most, sum(each() is not None for each in read))

    config = SimpleNamespace(model_path="target", is_draft_model=True)
    model = SimpleNamespace(load_weights=load)

    def update_weights_from_disk() -> tuple[bool, str]:
        model.load_weights(writes.Checkpoint(lambda: pt_weights_iterator(files)))
        return True, ""

    updater = SimpleNamespace(
        get_model=lambda: model, model_config=config, update_weights_from_disk=update_weights_from_disk
    )
    assert writes.WholeUpdater(updater).update_weights_from_disk() == (True, "")
    assert [norm.tolist() for norm in norms.values()] == [[float(number)] * 4 for number in range(4)]
    assert len(read) == 8 and most <= 2
