"""The steps of a launch: arguments, rules, plan, and the arguments of SGLang that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.checkpoint import plain_view
from sglang_dflash.drafter.formats import ARCHITECTURES
from sglang_dflash.errors import DFlashError, raise_first_error
from sglang_dflash.launch.asked import OUR_BACKEND, Launch
from sglang_dflash.launch.device import CPU, UNKNOWN_GPU, Device, local_gpu, why_no_accelerator
from sglang_dflash.launch.old_flags import explain_environment
from sglang_dflash.launch.plan import ServingPlan, backs_up_drafter, decide
from sglang_dflash.launch.published import AUTO, drafter_of
from sglang_dflash.launch.rules import EARLY, LATE, Rule, judge
from sglang_dflash.launch.settings import PLAIN_LAYERS, Settings
from sglang_dflash.launch.states import needs_bfloat16_states
from sglang_dflash.upstream import check_version, hooks, misfit, read_record, write_record
from sglang_dflash.upstream.launch import (
    DRAFT_ATTENTION_BACKEND_CHOICES,
    add_draft_attention_backend_choices,
    current_platform,
    declare_resolution,
    get_server_args,
    hybrid_gdn_config,
    model_config_of,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream.launch import ServerArgs

logger = logging.getLogger(__name__)
_LEVELS = {"note": logging.INFO, "warn": logging.WARNING}
_NVIDIA = Path("/dev/nvidiactl"), Path("/dev/dxg")  # Linux, WSL


@dataclass(frozen=True)
class Told:
    """Arguments of SGLang that this package replaces, by name."""

    first: Mapping[str, Any]  # before SGLang resolves speculation, for good
    meanwhile: Mapping[str, Any]  # only while it does
    then: Mapping[str, Any]  # after it has


def told_of_models(launch: Launch) -> dict[str, Any]:
    """Return what is replaced before SGLang reads the models."""
    changes: dict[str, Any] = {}
    if needs_bfloat16_states(launch):
        changes["mamba_ssm_dtype"] = "bfloat16"
    if launch.has_drafter and launch.kind is None and launch.settings.speculative_draft_model_quantization is None:
        # SGLang would apply the target's flag to the drafter
        changes["speculative_draft_model_quantization"] = PLAIN_LAYERS
    if launch.has_drafter and (view := plain_view(launch.loaded_files)):
        logger.warning("DFLASH: the drafter %s is loaded from its plain form in %s", launch.drafter_files.name, view)
        changes |= {"speculative_draft_model_path": str(view), "speculative_draft_model_revision": None}
    return changes


def told_of_plan(launch: Launch, plan: ServingPlan) -> Told:
    settings, first = launch.settings, dict[str, Any]()
    if plan.own_attention:
        first["speculative_draft_attention_backend"] = OUR_BACKEND
    if plan.widths is not None:
        # SGLang's runners would size their graphs by its own candidates, or by a block that no width reaches
        first |= {"speculative_adaptive": False}
        first |= dict.fromkeys(("speculative_num_draft_tokens", "speculative_dflash_block_size"), plan.block)
    if not plan.overlap:
        first["disable_overlap_schedule"] = True
    if backs_up_drafter(launch):
        first["enable_draft_weights_cpu_backup"] = True
    # SGLang reads the drafter's configuration, with the target's overrides, and requires a drafter
    meanwhile: dict[str, Any] = {"json_model_override_args": "{}"}
    if not plan.drafts:
        meanwhile = {"speculative_draft_model_path": settings.model_path, "speculative_draft_model_revision": None}
    then: dict[str, Any] = {}
    if plan.replay:
        # it would refuse a replay for DFLASH on these targets; its default dtype for one is float32, even if plain
        # decoding has another
        then = {"enable_linear_replayssm_spec": True, "linear_replayssm_cache_len": plan.records}
        then["mamba_ssm_dtype"] = plan.state_dtype
    return Told(first, meanwhile, then)


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
    _declare(server_args, **(changes := told_of_models(launch)))
    if view := changes.get("speculative_draft_model_path"):
        launch = launch.loaded_from(view)
    write_record(server_args, launch)


def around_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``: write the serving plan, or why SGLang's worker serves."""
    launch = read_record(server_args)
    if isinstance(launch, Launch):
        launch = replace(launch, sglangs_hybrid=hybrid_gdn_config(model_config_of(server_args)) is not None)
    if not isinstance(launch, Launch) or _is_left(server_args, launch, LATE):
        previous(server_args)
        return
    plan = decide(launch)
    write_record(server_args, plan)
    if plan.own_attention:
        accept_our_backend()
    told = told_of_plan(launch, plan)
    restored = {name: getattr(launch.settings, name) for name in told.meanwhile}
    _declare(server_args, **told.first, **told.meanwhile)
    previous(server_args)
    _declare(server_args, **restored, **told.then)


def _is_left(server_args: ServerArgs, launch: Launch, rules: Mapping[str, Rule]) -> bool:
    """Apply rules: raise an error, log the rest, and return whether SGLang's own worker serves."""
    for finding in judge(launch, rules):
        raise_first_error((finding,))
        if finding.level == "builtin":
            leave(server_args, finding.value)
            return True
        if finding.level in _LEVELS:
            logger.log(_LEVELS[finding.level], "DFLASH: %s", finding)
    return False


def leave(server_args: ServerArgs, reason: str) -> None:
    """Leave a launch to SGLang's own worker."""
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", reason)
    write_record(server_args, reason)


def override_drafter(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before ``ModelConfig.__init__``: a drafter has no overrides, where SGLang applies the target's."""
    if kwargs.get("is_draft_model") and isinstance(read_record(get_server_args()), ServingPlan):
        kwargs["model_override_args"] = "{}"
    return args, kwargs


def lift_context(model_config: Any, context_length: int | None) -> None:
    """Hook before ``ModelConfig._derive_context_length``: lift a shorter drafter's limit.

    A DFlash drafter cannot read out of bounds: its K/V use the target's slots, and its RoPE table covers the target's
    context plus the blocks beyond.
    """
    ours = set(model_config.hf_config.architectures or []) & set(ARCHITECTURES)
    if not (model_config.is_draft_model and ours and isinstance(read_record(get_server_args()), ServingPlan)):
        return
    text = model_config.hf_text_config
    if context_length is not None:
        text.max_position_embeddings = max(text.max_position_embeddings, context_length)


def capture_without_drafter(original: Callable[..., None], **kwargs: Any) -> None:
    """Hook around ``_resolve_dflash_aux_hidden_state``: without a drafter, capture no hidden states."""
    plan = read_record(get_server_args())
    if not isinstance(plan, ServingPlan) or plan.drafts:
        original(**kwargs)


def on_our_cpu_platform() -> bool:
    return bool(current_platform.is_out_of_tree() and current_platform.device_name == "cpu")


def refuse_without_accelerator() -> None:
    if current_platform.device_type == "cpu" and not current_platform.is_out_of_tree():
        name = "its GPU" if any(path.exists() for path in _NVIDIA) else None
        raise why_no_accelerator(name) or DFlashError(
            "SGLang serves with its CPU engine, not on a GPU", remedy="unset SGLANG_USE_CPU_ENGINE"
        )


def this_device(base_gpu_id: int) -> Device:
    """SGLang initialises CUDA here too."""
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
