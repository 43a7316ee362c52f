"""Refuse an incompatible SGLang; otherwise serve DFLASH with our worker class."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan import serving
from sglang_dflash.plan.device import why_no_accelerator
from sglang_dflash.plan.pair import OUR_BACKEND
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import check_version, hooks, misfit, read_record
from sglang_dflash.upstream.hooks import Hooks, install
from sglang_dflash.upstream.launch import (
    DRAFT_ATTENTION_BACKEND_CHOICES,
    add_draft_attention_backend_choices,
    current_platform,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream.launch import ServerArgs
    from sglang_dflash.upstream.worker import SpeculativeAlgorithm


logger = logging.getLogger(__name__)
_NVIDIA = Path("/dev/nvidiactl"), Path("/dev/dxg")  # Linux, WSL


def on_our_cpu_platform() -> bool:
    return bool(current_platform.is_out_of_tree() and current_platform.device_name == "cpu")


def refuse_without_accelerator() -> None:
    if current_platform.device_type == "cpu" and not current_platform.is_out_of_tree():
        name = "its GPU" if any(path.exists() for path in _NVIDIA) else None
        raise why_no_accelerator(name) or DFlashError(
            "SGLang serves with its CPU engine", expected="a CUDA GPU", remedy="unset SGLANG_USE_CPU_ENGINE"
        )


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: return our class for DFLASH."""
    # the CPU platform calls `worker_for`
    ours = worker_for(server_args) if algorithm.is_dflash() and not on_our_cpu_platform() else None
    return ours or original(algorithm, server_args)


def worker_for(server_args: ServerArgs) -> type | None:
    """Set this process's plan and return our worker class, or None; DFlashError for a launch without this package."""
    decided = read_record(server_args)
    if isinstance(decided, ServingPlan):
        serving.plan = decided
        install(*tables(decided))
        return our_worker()
    if not isinstance(decided, str):
        raise DFlashError(
            "the server arguments hold no DFLASH plan",
            expected="the plan that sglang-dflash makes in the launching process",
            remedy="install sglang-dflash where the server is launched too, in the same version",
        )
    serving.plan = None
    return None


def tables(plan: ServingPlan) -> Iterator[Hooks]:
    """Return the hooks of the features that a plan has, for a scheduler."""
    from sglang_dflash.features import reports, requests
    from sglang_dflash.features.updates import writes

    yield from (requests.HOOKS, reports.HOOKS, writes.HOOKS)
    if plan.widths is not None:
        yield reports.WIDTH_HOOKS


def accept_our_backend() -> None:
    """Make SGLang accept our attention backend for the drafter, in this process."""
    if OUR_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([OUR_BACKEND])


def our_worker() -> type:
    from sglang_dflash.drafter.formats import ARCHITECTURES
    from sglang_dflash.model.backend import BlockAttention
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.upstream.worker import add_models, register_attention_backend
    from sglang_dflash.worker.worker import DFlashWorker

    check_version()
    hooks.check()
    accept_our_backend()
    register_attention_backend(OUR_BACKEND)(BlockAttention)
    add_models(dict.fromkeys(ARCHITECTURES, DFlashDraftModel))
    return DFlashWorker


def capture_layers(original: Callable[..., None], model: Any, layer_ids: list[int]) -> None:
    """Hook around ``Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture``, which fails in SGLang 0.5.23.

    It calls a method that Qwen3-VL's language model lacks. EAGLE-3's captures the same layers.
    """
    if hasattr(model.model, "set_dflash_layers_to_capture"):
        original(model, layer_ids)
    else:
        model.set_eagle3_layers_to_capture(layer_ids)


@cache
def check_sglang() -> None:
    """Raise DFlashError for an untested SGLang, or without a name or hook that we need."""
    if note := check_version():
        logger.warning("DFLASH: %s", note)
    try:
        import_module("sglang_dflash.upstream.worker")
    except Exception as error:  # including what libraries raise that do not fit the driver
        raise misfit(error) from error
    hooks.check()
