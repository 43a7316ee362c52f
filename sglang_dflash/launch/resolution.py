"""The steps of a launch: arguments, rules, plan, and the arguments of SGLang that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.checkpoint import ModelFiles, plain_view
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device, local_gpu, why_no_accelerator
from sglang_dflash.launch.launch import OUR_BACKEND, Launch
from sglang_dflash.launch.old_flags import explain_environment
from sglang_dflash.launch.plan import Decision, ServingPlan, attach_decision, backs_up_drafter, decide, decision_of
from sglang_dflash.launch.published import AUTO, drafter_of
from sglang_dflash.launch.rules import EARLY, LATE, Rule, judge
from sglang_dflash.launch.settings import PLAIN_LAYERS, Settings
from sglang_dflash.launch.states import needs_bfloat16_states
from sglang_dflash.upstream import check_version, hooks, misfit
from sglang_dflash.upstream.names import (
    DRAFT_ATTENTION_BACKEND_CHOICES,
    add_draft_attention_backend_choices,
    current_platform,
    declare_resolution,
    hybrid_gdn_config,
    mambaish_config,
    model_config_of,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream.names import ServerArgs

logger = logging.getLogger(__name__)
_LEVELS = {"note": logging.INFO, "warn": logging.WARNING}
_NVIDIA = Path("/dev/nvidiactl"), Path("/dev/dxg")  # Linux, WSL


def changes_for_models(launch: Launch) -> dict[str, Any]:
    """Return what is replaced before SGLang reads the models."""
    changes: dict[str, Any] = {}
    if needs_bfloat16_states(launch):
        changes["mamba_ssm_dtype"] = "bfloat16"
    if launch.has_drafter and launch.settings.speculative_draft_model_quantization is None:
        # SGLang would apply the target's flag to the drafter; the drafter's config.json still applies
        changes["speculative_draft_model_quantization"] = PLAIN_LAYERS
    if launch.has_drafter and (view := plain_view(launch.drafter_files)):
        logger.warning("DFLASH: the drafter %s is loaded from its plain form in %s", launch.drafter_files.name, view)
        changes |= {"speculative_draft_model_path": str(view), "speculative_draft_model_revision": None}
    return changes


def changes_for_plan(launch: Launch, plan: ServingPlan) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return what is replaced before, during and after SGLang resolves speculation."""
    settings, before = launch.settings, dict[str, Any]()
    if plan.own_attention:
        before["speculative_draft_attention_backend"] = OUR_BACKEND
    if plan.widths is not None:
        # SGLang would size its graphs by its adaptive candidates, or by a block wider than every width
        before |= {"speculative_adaptive": False}
        before |= dict.fromkeys(("speculative_num_draft_tokens", "speculative_dflash_block_size"), plan.block)
    if not plan.overlap:
        before["disable_overlap_schedule"] = True
    if backs_up_drafter(launch):
        before["enable_draft_weights_cpu_backup"] = True
    # SGLang would apply the target's overrides to the drafter, and requires a drafter's path: hide both meanwhile
    during: dict[str, Any] = {"json_model_override_args": "{}"}
    if not plan.has_drafter:
        during = {"speculative_draft_model_path": settings.model_path, "speculative_draft_model_revision": None}
    after: dict[str, Any] = {}
    if plan.replay:
        # SGLang refuses a replay for DFLASH while it resolves speculation. Its default dtype for a replay is float32,
        # also where plain decoding has another.
        after = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": plan.records}
        after["mamba_ssm_dtype"] = plan.state_dtype
    return before, during, after


def after_model_paths(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_model_source_paths``: apply the early rules and raise their first error."""
    settings = Settings(resolving_view(server_args))
    if str(settings.speculative_algorithm).upper() != "DFLASH":
        previous(server_args)
        return
    if settings.speculative_draft_model_path == AUTO:
        drafter = drafter_of(settings.model_path)
        logger.info("DFLASH: --speculative-draft-model-path auto is %s, for %s", drafter, settings.model_path)
        _declare(server_args, speculative_draft_model_path=drafter)
    previous(server_args)
    for line in explain_environment():
        logger.warning("DFLASH: %s", line)
    if not settings.wants_builtin:
        refuse_without_accelerator()
    launch = Launch.of(settings, this_device(settings.base_gpu_id))
    if _is_left(server_args, launch, EARLY):
        return
    check_sglang()
    _declare(server_args, **(changes := changes_for_models(launch)))
    if view := changes.get("speculative_draft_model_path"):
        launch = replace(launch, drafter_files=ModelFiles(view))
    attach_decision(server_args, Decision(launch=launch))


def around_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``: write the serving plan, or why SGLang's worker serves."""
    launch = decision_of(server_args).launch
    if launch is not None:
        model = model_config_of(server_args)
        hybrid, recurrent = (read(model) is not None for read in (hybrid_gdn_config, mambaish_config))
        launch = replace(launch, sglangs_hybrid=hybrid, other_states=recurrent and not hybrid)
    if launch is None or _is_left(server_args, launch, LATE):
        previous(server_args)
        return
    plan = decide(launch)
    attach_decision(server_args, Decision(plan))
    if plan.own_attention:
        accept_our_backend()
    before, during, after = changes_for_plan(launch, plan)
    restored = {name: getattr(launch.settings, name) for name in during}
    _declare(server_args, **before, **during)
    previous(server_args)
    _declare(server_args, **restored, **after)


def _is_left(server_args: ServerArgs, launch: Launch, rules: Mapping[str, Rule]) -> bool:
    """Apply rules: raise an error, log the rest, and return whether SGLang's own worker serves."""
    for finding in judge(launch, rules):
        if finding.level == "error":
            raise DFlashError(finding.value, finding.remedy)
        if finding.level == "builtin":
            leave(server_args, finding.value)
            return True
        if finding.level in _LEVELS:
            logger.log(_LEVELS[finding.level], "DFLASH: %s", finding)
    return False


def leave(server_args: ServerArgs, reason: str) -> None:
    """Leave a launch to SGLang's own worker."""
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", reason)
    attach_decision(server_args, Decision(reason=reason))


def on_our_cpu_platform() -> bool:
    return bool(current_platform.is_out_of_tree() and current_platform.device_name == "cpu")


def refuse_without_accelerator() -> None:
    if current_platform.device_type == "cpu" and not current_platform.is_out_of_tree():
        name = "its GPU" if any(path.exists() for path in _NVIDIA) else None
        raise why_no_accelerator(name) or DFlashError(
            "SGLang serves with its CPU engine, not on a GPU", remedy="unset SGLANG_USE_CPU_ENGINE"
        )


def this_device(base_gpu_id: int) -> Device:
    """Return the device of the first rank. Initialises CUDA, as SGLang does at this point."""
    if on_our_cpu_platform():
        return CPU
    if base_gpu_id >= torch.cuda.device_count():
        return replace(UNKNOWN_GPU, is_local=True)
    return local_gpu(base_gpu_id)


def accept_our_backend() -> None:
    """Make SGLang accept our attention backend for the drafter, in this process."""
    if OUR_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([OUR_BACKEND])


@cache
def check_sglang() -> None:
    """Raise DFlashError for an untested SGLang, or without a name or hook that we need."""
    if note := check_version():
        logger.warning("DFLASH: %s", note)
    try:
        import_module("sglang_dflash.worker.worker")
    except Exception as error:  # including what libraries raise that do not fit the driver
        raise misfit(error) from error
    hooks.check()


def _declare(server_args: ServerArgs, **changes: Any) -> None:
    declare_resolution(server_args, "sglang_dflash", **changes)
