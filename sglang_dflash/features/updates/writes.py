"""Writes of a running server's weights: to the selected model only, completely or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
from sglang.srt.managers.io_struct import (
    BeginWeightUpdateReqOutput,
    ResumeMemoryOccupationReqOutput,
    UpdateWeightFromDiskReqOutput,
)
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
from sglang.srt.model_executor.model_runner_components.weight_updater import _model_load_weights_direct
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.features.updates.requests import refused_folder
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.upstream.launch import get_parallel, get_server_args

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]

# parts of names that SGLang's loaders skip: derived tables, tied heads, layers that draft, K/V scales
_SKIPPED = ("rotary_emb.", "lm_head.", "mtp.", "_scale")


class Updates(SchedulerWeightUpdaterManager):
    """A scheduler's updates of a target and its drafter, each whole."""

    _written: list[str]  # roles of the latest update

    def __post_init__(self) -> None:
        super().__post_init__()
        for _, runner in super()._select_runners():
            runner.weight_updater = WholeUpdater(runner.weight_updater)

    def _select_runners(self, selector: str = "all") -> list[tuple[str, Any]]:
        """Treat ``"all"`` as the target."""
        selected = super()._select_runners("target" if selector == "all" else selector)
        self._written = [role for role, _ in selected]
        return selected

    def record_weight_version_after_update(self, weight_version: str | None) -> None:
        """Called after each successful update."""
        super().record_weight_version_after_update(weight_version)
        for role in self._written:
            self.draft_worker.weights_updated(role, weight_version)

    def begin_weight_update(self, recv_req: Any) -> Any:
        """Refuse a quantised drafter: after a load its layers hold its weights in the form of their kernels."""
        for role, runner in self._select_runners(recv_req.selector):
            if role == "draft" and (method := runner.model_config.quantization):
                problem = f"the drafter is quantised ({method}) and cannot be updated: restart the server with another"
                return BeginWeightUpdateReqOutput(success=False, message=problem)
        return super().begin_weight_update(recv_req)

    def update_weights_from_disk(self, recv_req: Any) -> Any:
        if problem := refused_folder(recv_req.model_path):
            return UpdateWeightFromDiskReqOutput(success=False, message=problem)
        return super().update_weights_from_disk(recv_req)

    def resume_memory_occupation(self, recv_req: Any) -> Any:
        """Refuse to resume memory that was not released, which would end the scheduler."""
        missing = set(recv_req.tags or GPU_MEMORY_ALL_TYPES) - self.offload_tags
        if not missing:
            return super().resume_memory_occupation(recv_req)
        tags = ", ".join(sorted(missing))
        problem = f"cannot resume {tags}: /release_memory_occupation was not called with these tags"
        return ResumeMemoryOccupationReqOutput(rid=problem)  # the only field that reaches the HTTP process


class WholeUpdater:
    """A model runner's updater that refuses tensors that do not fit before any is written.

    The model loads the tensors twice, the first time without writing.
    """

    def __init__(self, updater: Any) -> None:
        self._updater = updater

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._updater, name)
        updates = name.startswith(("update_weights_from_", "load_weights_from_"))
        return partial(self._update, found) if updates else found

    def _update(self, update: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
        model, config = self._updater.get_model(), self._updater.model_config
        path, load, served = config.model_path, model.load_weights, model.load_weights
        if kwargs.get("load_format") == "direct":  # would bypass load_weights
            kwargs["load_format"], load = None, partial(_model_load_weights_direct, model)
        refused: list[Refused] = []

        def load_wholly(weights: Weights) -> Any:
            if refused:  # SGLang rolls a failed update back
                return None
            if not isinstance(weights, Checkpoint):
                weights = list(weights)
            try:
                skipped = try_to_load(load, weights)
                if not config.is_draft_model:  # the drafter's loader raises for unknown names
                    refuse_unknown(skipped)
            except Refused as error:
                refused.append(error)
                raise
            return load(weights)

        model.load_weights = load_wholly
        try:
            success, message = update(*args, **kwargs)
        except Exception as error:  # process edge: a client's tensors
            logger.exception("DFLASH: a weight update failed")
            success, message = False, str(error)
        model.load_weights = served
        if not success:
            config.model_path = path
        return success, str(refused[0]) if refused else message


class Checkpoint(partial[Iterator[tuple[str, Tensor]]]):
    """A checkpoint's tensors, from the first one in each iteration; a list would keep all in memory."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self()


def stream(original: Callable[..., Iterator[tuple[str, Tensor]]], *args: Any, **kwargs: Any) -> Checkpoint:
    """Hook around ``DefaultModelLoader._get_weights_iterator``."""
    original(*args, **kwargs)  # raises for missing files; reads no tensor
    return Checkpoint(original, *args, **kwargs)


class Refused(ValueError):
    def __init__(self, problem: str) -> None:
        super().__init__(f"the weight update was refused, and nothing was written: {problem}")


def try_to_load(load: Callable[[Weights], Any], weights: Weights) -> list[str]:
    """Load without writing, and return the names of the tensors that the loader skips, if it reads one at a time.

    Raises:
        Refused: the loader raises.
    """
    reached, read, skipped, mode = "no tensor", 0, list[str](), _WithoutWrites()

    def named() -> Iterator[tuple[str, Tensor]]:
        nonlocal reached, read
        for name, tensor in weights:
            reached, before, read = f"{name} {list(tensor.shape)}", mode.copies, read + 1
            yield name, tensor
            if mode.copies == before:
                skipped.append(name)

    try:
        with mode:
            load(named())
    except Exception as error:  # the models' loaders raise any exception
        raise Refused(f"{type(error).__name__} at {reached}: {error}") from error
    return [] if mode.copies and len(skipped) == read else skipped


def refuse_unknown(skipped: Sequence[str]) -> None:
    """Raise Refused for tensors that the target's loader skips, unless ``_SKIPPED`` names them, they are other ranks'
    experts, or the launch skipped them."""
    known = (*_SKIPPED, ".experts.") if get_parallel().moe_ep_size > 1 else _SKIPPED
    unknown = [name for name in skipped if not any(part in name for part in known)]
    if unknown:
        launched = ModelFiles(get_server_args().model_path, get_server_args().revision).tensors or unknown
        unknown = [name for name in unknown if name not in launched]
    if unknown:
        raise Refused(f"the target has no parameter for {len(unknown)} tensors: {', '.join(unknown[:8])}")


class _WithoutWrites(TorchDispatchMode):
    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not name.endswith("_") or name == "aten::set_" or not isinstance(args[0], Tensor):  # torch.load calls set_
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copies += 1
            to, source = args[:2]
            if torch.broadcast_shapes(to.shape, source.shape) != to.shape:
                raise ValueError(f"a tensor of shape {list(source.shape)} for one of {list(to.shape)}")
            if to.is_floating_point() and not source.is_floating_point():
                raise ValueError(f"a tensor of {source.dtype} for one of {to.dtype}")
        return args[0]


HOOKS = Hooks(
    around={"model_loader.loader.DefaultModelLoader._get_weights_iterator": stream},
    values={"managers.scheduler.SchedulerWeightUpdaterManager": Updates},
)
