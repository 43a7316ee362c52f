"""Weight updates of a running server: the selected model alone, and whole or not at all."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_dflash.plan import serving

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, Tensor]]


def update_target_only(result: list[tuple[str, Any]], _: Any, selector: str = "all") -> list[tuple[str, Any]]:
    """Hook after ``SchedulerWeightUpdaterManager._select_runners``: treat ``"all"`` as the target.

    SGLang would load the same tensors into both models: a drafter as wide as its target would draft with the target's.
    ``"draft"`` still selects the drafter. ``result`` holds role and runner of each selected model.
    """
    if selector != "all" or serving.plan is None:
        return result
    return [(role, runner) for role, runner in result if role == "target"]


def update_wholly(original: Callable[..., tuple[bool, str]], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around the updates of ``WeightUpdater``: refuse tensors that do not fit before one of them is written.

    SGLang's model loads the tensors twice, the first time without writing. What it raises then is the answer to the
    client; SGLang would end the scheduler, or serve a model that is half loaded.
    """
    if serving.plan is None:
        return original(updater, *args, **kwargs)
    model, config = updater.get_model(), updater.model_config
    load, path = model.load_weights, config.model_path
    refused: list[Refused] = []

    def load_wholly(weights: Weights) -> Any:
        if refused:  # SGLang rolls a failed update back, and nothing was written
            return None
        fitting = list(weights)
        try:
            try_to_load(load, fitting)
        except Refused as error:
            refused.append(error)
            raise
        return load(fitting)

    own = vars(model).get("load_weights")
    model.load_weights = load_wholly
    try:
        success, message = original(updater, *args, **kwargs)
    except Exception as error:  # the edge of the process, for the tensors of a client
        logger.exception("DFLASH: a weight update failed")
        success, message = False, str(error)
    finally:
        del model.load_weights
        if own is not None:
            model.load_weights = own
    if refused:
        config.model_path = path
        return False, str(refused[0])
    return success, message


def load_directly(original: Callable[..., None], model: Any, named_tensors: list[tuple[str, Tensor]]) -> None:
    """Hook around ``_model_load_weights_direct``, which writes parameters without the model's ``load_weights``."""
    if serving.plan is not None:
        try_to_load(lambda weights: original(model, weights), named_tensors)
    original(model, named_tensors)


class Refused(ValueError):
    """The tensors of an update do not fit, and none was written."""


def try_to_load(load: Callable[[Weights], Any], weights: Weights) -> None:
    """Load without writing; raise Refused with what that raises, and the tensor at which it is."""
    reached = "no tensor"

    def named() -> Iterator[tuple[str, Tensor]]:
        nonlocal reached
        for name, tensor in weights:
            reached = name
            yield name, tensor

    try:
        with _WithoutWrites():
            load(named())
    except Exception as error:  # the models' loaders raise what they like
        raise Refused(
            f"the weight update was refused, and nothing was written: {type(error).__name__} at {reached}: {error}"
        ) from error


class _WithoutWrites(TorchDispatchMode):
    """Check what is copied in place, and write nothing in place."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func._schema.name.endswith("_") or not isinstance(args[0], Tensor):
            return func(*args, **(kwargs or {}))
        if (
            func is torch.ops.aten.copy_.default
            and torch.broadcast_shapes(args[0].shape, args[1].shape) != args[0].shape
        ):
            raise ValueError(f"a tensor of shape {list(args[1].shape)} for one of {list(args[0].shape)}")
        return args[0]
