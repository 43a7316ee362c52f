"""A server's launch: check the pair, make the serving plan and write it into SGLang's arguments."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.checkpoint import plain_view
from sglang_dflash.drafter.formats import ARCHITECTURES
from sglang_dflash.errors import Finding, raise_first_error
from sglang_dflash.launch.flags import explain_environment
from sglang_dflash.launch.takeover import (
    accept_our_backend,
    check_sglang,
    enter_tokenizer,
    on_our_cpu_platform,
    refuse_without_accelerator,
)
from sglang_dflash.plan.choice import left_untouched, reason_for_builtin, refuse_builtin
from sglang_dflash.plan.device import CPU, UNKNOWN_GPU, Device, local_gpu
from sglang_dflash.plan.exact import check_exact
from sglang_dflash.plan.pair import OUR_BACKEND, Pair
from sglang_dflash.plan.published import AUTO, drafter_of
from sglang_dflash.plan.rules import check_rules
from sglang_dflash.plan.serving import ServingPlan, decide
from sglang_dflash.plan.settings import PLAIN_LAYERS, REPLAY_SWITCH, SWITCH, Settings
from sglang_dflash.plan.states import needs_bfloat16_states
from sglang_dflash.upstream import read_record, write_record
from sglang_dflash.upstream.launch import (
    declare_resolution,
    get_server_args,
    hybrid_gdn_config,
    model_config_of,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream.launch import ServerArgs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """A checked launch, which the first hook hands on to the second.

    Between them SGLang resolves ``--page-size``, ``--enable-dp-lm-head``, attention backends and others: ``settings``
    always reads the resolved values.
    """

    settings: Settings
    pair: Pair
    device: Device


def after_model_paths(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_model_source_paths``: check the pair and raise its first error."""
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
    settings.validate()
    if settings.wants_builtin:
        refuse_builtin(this_device(settings.base_gpu_id))
        _leave(server_args, f"{SWITCH}=builtin")
        return
    refuse_without_accelerator()
    device, pair = this_device(settings.base_gpu_id), Pair.of(settings)
    if reason := left_untouched(settings, pair, device):
        _leave(server_args, reason)
        return
    check_sglang()
    _log_findings(check_rules(settings, pair, device))
    if needs_bfloat16_states(settings, device):
        _declare(server_args, mamba_ssm_dtype="bfloat16")
    if pair.has_drafter and pair.kind is None and settings.speculative_draft_model_quantization is None:
        # SGLang would apply the target's flag to the drafter
        _declare(server_args, speculative_draft_model_quantization=PLAIN_LAYERS)
    if pair.has_drafter and (view := plain_view(pair.loaded_files)):
        logger.warning("DFLASH: the drafter %s is loaded from its plain form in %s", pair.drafter_files.name, view)
        _declare(server_args, speculative_draft_model_path=str(view), speculative_draft_model_revision=None)
        pair = pair.loaded_from(view)
    write_record(server_args, Launch(settings, pair, device))


def around_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``: write the serving plan, or the reason for SGLang's own
    worker."""
    launch = read_record(server_args)
    if not isinstance(launch, Launch):
        previous(server_args)
        return
    settings, pair, device = launch.settings, launch.pair, launch.device
    if reason := reason_for_builtin(settings, pair, device):
        _leave(server_args, reason)
        previous(server_args)
        return
    # SGLang's own answer, which it has only now: it replays the states of gated delta nets alone
    hybrid = hybrid_gdn_config(model_config_of(server_args)) is not None
    plan = decide(settings, pair, device, hybrid=hybrid)
    _log_findings(check_exact(plan.exact, plan.inexact))
    write_record(server_args, plan)
    enter_tokenizer()
    if plan.own_attention:
        accept_our_backend()
        _declare(server_args, speculative_draft_attention_backend=OUR_BACKEND)
    if plan.widths is not None:
        # SGLang's runners would size their graphs by its own candidates, or by a block that no width reaches
        block = {"speculative_num_draft_tokens": plan.block, "speculative_dflash_block_size": plan.block}
        _declare(server_args, speculative_adaptive=False, **block)
    if not plan.overlap and not settings.disable_overlap_schedule:
        _declare(server_args, disable_overlap_schedule=True)
        logger.warning(
            "DFLASH: no overlap scheduling on a decoding server of a hybrid target, whose retracted requests would "
            "resume with a state ahead of their tokens (--disaggregation-decode-retraction-backup none aborts them "
            "instead)"
        )
    if settings.enable_memory_saver and not settings.enable_weights_cpu_backup and plan.drafts:
        # after a resume a trainer writes the target only
        _declare(server_args, enable_draft_weights_cpu_backup=True)
        logger.info("DFLASH: the drafter's weights are backed up in host memory while the server sleeps")
    # the step reads the drafter's configuration, with the target's overrides, and requires a drafter
    only_now: dict[str, Any] = {"json_model_override_args": json.dumps(plan.overrides)}
    if not plan.drafts:
        only_now = {"speculative_draft_model_path": settings.model_path, "speculative_draft_model_revision": None}
    restored = {name: getattr(settings, name) for name in only_now}
    _declare(server_args, **only_now)
    previous(server_args)
    _declare(server_args, **restored)
    if plan.kept_by:
        logger.info("DFLASH: storing a recurrent state per draft token: %s", plan.kept_by)
    if plan.replay:  # declared now, because SGLang would refuse a replay for DFLASH on these targets
        logger.info(
            "DFLASH: replaying recurrent states instead of storing one per draft token (%s=0 stores them)",
            REPLAY_SWITCH,
        )
        _declare(server_args, enable_linear_replayssm_spec=True, linear_replayssm_cache_len=plan.records)
        # SGLang's default for a replay is float32, even if plain decoding has another dtype
        _declare(server_args, mamba_ssm_dtype=plan.state_dtype)


def override_drafter(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hook before ``ModelConfig.__init__``: a drafter has its own overrides, where SGLang applies the target's."""
    if kwargs.get("is_draft_model") and isinstance(plan := read_record(get_server_args()), ServingPlan):
        kwargs["model_override_args"] = json.dumps(plan.overrides)
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


def this_device(base_gpu_id: int) -> Device:
    """SGLang initialises CUDA here too."""
    if on_our_cpu_platform():
        return CPU
    if base_gpu_id >= torch.cuda.device_count():
        return replace(UNKNOWN_GPU, is_local=True)
    return local_gpu(base_gpu_id)


def _log_findings(findings: Iterable[Finding]) -> None:
    found = list(findings)
    raise_first_error(found)
    for finding in found:
        if finding.level != "ok":
            logger.log(logging.INFO if finding.level == "note" else logging.WARNING, "DFLASH: %s", finding)


def _declare(server_args: ServerArgs, **changes: Any) -> None:
    declare_resolution(server_args, "sglang_dflash", **changes)


def _leave(server_args: ServerArgs, reason: str) -> None:
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", reason)
    write_record(server_args, reason)
