"""Weight updates of a running server: the selected model only, completely or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.plan import serving
from sglang_dflash.upstream.launch import get_parallel, get_server_args

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]

# parts of names that SGLang's loaders skip: derived tables, tied heads, layers that draft, K/V scales
_SKIPPED = ("rotary_emb.", "lm_head.", "mtp.", "_scale")
written: list[str] = []  # roles of updated models that the worker has not received


def update_wholly(original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the updates of ``WeightUpdater``: refuse tensors that do not fit before any is written.

    The model loads the tensors twice, the first time without writing.
    """
    if serving.plan is None:
        return original(updater, *args, **kwargs)
    model, config = updater.get_model(), updater.model_config
    load, path = model.load_weights, config.model_path
    refused: list[Refused] = []

    def load_wholly(weights: Weights) -> Any:
        if refused:  # SGLang rolls a failed update back
            return None
        fitting = list(weights)
        try:
            skipped = try_to_load(load, fitting)
            if not config.is_draft_model:  # the drafter's loader raises for unknown names
                refuse_unknown(skipped)
        except Refused as error:
            refused.append(error)
            raise
        return load(fitting)

    try:
        with patch.object(model, "load_weights", load_wholly):
            success, message = original(updater, *args, **kwargs)
    except Exception as error:  # process edge: a client's tensors
        logger.exception("DFLASH: a weight update failed")
        success, message = False, str(error)
    if success:
        written.append("draft" if config.is_draft_model else "target")
    else:
        config.model_path = path
    return success, str(refused[0]) if refused else message


def load_directly(original: Callable[..., None], model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Hook around ``_model_load_weights_direct``, which bypasses ``load_weights``."""
    if serving.plan is not None:
        try_to_load(lambda weights: original(model, weights), named_tensors)
    original(model, named_tensors)


class Refused(ValueError):
    def __init__(self, problem: str) -> None:
        super().__init__(f"the weight update was refused, and nothing was written: {problem}")


def try_to_load(load: Callable[[Weights], Any], weights: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Load without writing, and return the names of the tensors that the loader skips, if it reads one at a time.

    Raises:
        Refused: the loader raises.
    """
    reached, skipped, mode = "no tensor", list[str](), _WithoutWrites()

    def named() -> Iterator[tuple[str, Tensor]]:
        nonlocal reached
        for name, tensor in weights:
            reached, before = f"{name} {list(tensor.shape)}", mode.copies
            yield name, tensor
            if mode.copies == before:
                skipped.append(name)

    try:
        with mode:
            load(named())
    except Exception as error:  # the models' loaders raise any exception
        raise Refused(f"{type(error).__name__} at {reached}: {error}") from error
    return [] if mode.copies and len(skipped) == len(weights) else skipped


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
        if not func._schema.name.endswith("_") or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        if func is torch.ops.aten.copy_.default:
            self.copies += 1
            to, source = args[:2]
            if torch.broadcast_shapes(to.shape, source.shape) != to.shape:
                raise ValueError(f"a tensor of shape {list(source.shape)} for one of {list(to.shape)}")
            if to.is_floating_point() and not source.is_floating_point():
                raise ValueError(f"a tensor of {source.dtype} for one of {to.dtype}")
        return args[0]
