"""Refuse an SGLang that this package does not fit; otherwise serve DFLASH with our worker class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan import serving
from sglang_dflash.plan.device import why_no_accelerator
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import HookRegistry, check_symbols, check_version

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs, SpeculativeAlgorithm


logger = logging.getLogger(__name__)
_NVIDIA = Path("/dev/nvidiactl"), Path("/dev/dxg")  # of the driver, on Linux and in WSL


def on_our_cpu_platform() -> bool:
    """Whether this process serves on an out-of-tree platform for CPUs."""
    platform = upstream.current_platform
    return bool(platform.is_out_of_tree() and platform.device_name == "cpu")


def refuse_without_accelerator() -> None:
    """Raise DFlashError on a machine that neither SGLang nor an out-of-tree platform can serve on."""
    platform = upstream.current_platform
    if platform.device_type == "cpu" and not platform.is_out_of_tree():
        name = "its GPU" if any(path.exists() for path in _NVIDIA) else None
        raise why_no_accelerator(name) or DFlashError(
            "SGLang serves with its CPU engine", expected="a CUDA GPU", remedy="unset SGLANG_USE_CPU_ENGINE"
        )


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: our class for DFLASH, SGLang's for the rest."""
    # On the CPU platform SGLang takes the class from the platform, which calls `worker_for`.
    ours = worker_for(server_args) if algorithm.is_dflash() and not on_our_cpu_platform() else None
    return ours or original(algorithm, server_args)


def worker_for(server_args: ServerArgs) -> type | None:
    """Return our worker class, or None if SGLang's own serves these arguments; set the plan of this process.

    Raises:
        DFlashError: the arguments come from a launch without this package.
    """
    decided = upstream.read_record(server_args)
    if isinstance(decided, ServingPlan):
        serving.plan = decided
        return our_worker()
    if not isinstance(decided, str):
        raise DFlashError(
            "the server arguments hold no DFLASH plan",
            expected="the plan that sglang-dflash makes in the launching process",
            remedy="install sglang-dflash where the server is launched too, in the same version",
        )
    serving.plan = None
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", decided)
    return None


def our_worker() -> type:
    """Return our worker class; its drafter is added to SGLang's model registry."""
    from sglang_dflash.drafter.formats import ARCHITECTURES
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    upstream.check_version()
    upstream.ModelRegistry.models.update(dict.fromkeys(ARCHITECTURES, DFlashDraftModel))
    # Under speculation SGLang samples a token even if none is requested. Hooks cannot replace a property.
    upstream.Req.is_prefill_only = property(lambda req: req.sampling_params.max_new_tokens == 0)
    return DFlashWorker


def capture_layers(original: Callable[..., None], model: Any, layer_ids: list[int]) -> None:
    """Hook around ``Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture``, which fails in SGLang 0.5.23.

    It calls a method of the language model that Qwen3.5 has and Qwen3-VL lacks. EAGLE-3's method captures the same
    layers without it.
    """
    if hasattr(model.model, "set_dflash_layers_to_capture"):
        original(model, layer_ids)
    else:
        model.set_eagle3_layers_to_capture(layer_ids)


@cache
def check_sglang() -> None:
    """Raise DFlashError for an SGLang of an untested version, or one that lacks a name or a hook that we need."""
    if note := check_version():
        logger.warning("DFLASH: %s", note)
    check_symbols()
    # SGLang only logs a hook that it could not apply, and would serve with its own worker.
    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()
        if any(hook.__module__.partition(".")[0] == "sglang_dflash" for _, hook, _ in hooks)
    }
    if missing := sorted(ours - HookRegistry._patched):
        raise DFlashError(
            f"hooks not applied: {', '.join(missing)}",
            expected="every hook of sglang-dflash in place",
            remedy="read the log's traceback; install the SGLang version this release is tested with",
        )
