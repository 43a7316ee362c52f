"""A server's launch: check the pair, make the serving plan, write it into SGLang's arguments.

All of it runs while SGLang resolves its arguments, before any process or weight. SGLang's plugin loader only logs what
plugins raise; an exception in argument resolution stops the server, with a non-zero exit status.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import plain_view
from sglang_dflash.drafter.formats import kind_left_to_builtin
from sglang_dflash.hooks.flags import explain_environment
from sglang_dflash.hooks.takeover import (
    check_sglang,
    on_our_cpu_platform,
    refuse_unapplied_hooks,
    refuse_without_accelerator,
)
from sglang_dflash.plan.decide import builtin_requested, decide, reason_for_builtin
from sglang_dflash.plan.findings import Finding, raise_first_error
from sglang_dflash.plan.machine import CPU, UNKNOWN_GPU, Machine, find_gpu, size
from sglang_dflash.plan.pair import PLAIN_LAYERS, drafter_files, needs_bfloat16_states
from sglang_dflash.plan.replay import SWITCH
from sglang_dflash.plan.rules import check_memory, check_rules
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import (
    declare_resolution,
    declared_resolutions,
    hybrid_gdn_config,
    model_config_of,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs

logger = logging.getLogger(__name__)
_SOURCE = "sglang_dflash"  # of our declarations in SGLang's arguments


def after_model_paths(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_model_source_paths``, the first step that knows both models.

    Raises:
        DFlashError: the first thing that cannot work.
    """
    previous(server_args)
    if not _dflash_is_asked_for(server_args):
        return
    for line in explain_environment():
        logger.warning("DFLASH: %s", line)
    if builtin_requested():
        return
    refuse_without_accelerator()
    args = resolving_view(server_args)
    machine = this_machine(args.base_gpu_id)
    check_sglang(machine)
    refuse_unapplied_hooks()
    _say(check_rules(args, machine))
    if needs_bfloat16_states(args, machine):
        _declare(server_args, mamba_ssm_dtype="bfloat16")
    if not args.speculative_draft_model_path:
        return
    files = drafter_files(args)
    if kind_left_to_builtin(files.config) is not None:
        files = replace(files, dequantise=False)
    elif args.speculative_draft_model_quantization is None:
        # SGLang would quantise the drafter's layers as the flag says of the target's.
        _declare(server_args, speculative_draft_model_quantization=PLAIN_LAYERS)
    if view := plain_view(files):
        logger.warning(
            "DFLASH: the drafter %s is loaded from its plain form in %s", args.speculative_draft_model_path, view
        )
        _declare(server_args, speculative_draft_model_path=str(view), speculative_draft_model_revision=None)


def around_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``, which knows device, parallelism and memory fraction.

    Raises:
        DFlashError: the arguments ask for something that cannot be served.
    """
    args, plan = resolving_view(server_args), None
    if _dflash_is_asked_for(server_args) and reason_for_builtin(args, on_cpu=on_our_cpu_platform()) is None:
        hybrid = hybrid_gdn_config(model_config_of(server_args)) is not None
        plan = decide(args, this_machine(args.base_gpu_id), hybrid=hybrid)
        _say(check_memory(plan))
        _before_speculation(server_args, plan)
    previous(server_args)
    if plan is not None and plan.replay:
        _replay_states(server_args, plan)


def _before_speculation(server_args: ServerArgs, plan: ServingPlan) -> None:
    if plan.widths is not None:
        # SGLang's own adaptation must stay off: its runners would size their graphs by its candidates.
        _declare(server_args, speculative_adaptive=False)
    if not plan.overlap and not resolving_view(server_args).disable_overlap_schedule:
        _declare(server_args, disable_overlap_schedule=True)
        logger.warning(
            "DFLASH: no overlap scheduling on a decoding server of a hybrid target, whose retracted requests would "
            "come back with a state ahead of their tokens (--disaggregation-decode-retraction-backup none aborts them "
            "instead)"
        )


def adapts(server_args: ServerArgs) -> bool:
    """Whether the launch decided that our worker serves these arguments at adaptive widths; no file is read."""
    return any(by == _SOURCE and "speculative_adaptive" in fields for by, fields in declared_resolutions(server_args))


def _replay_states(server_args: ServerArgs, plan: ServingPlan) -> None:
    """After SGLang has resolved speculation, which would refuse a replay for DFLASH on these targets."""
    changes: dict[str, Any] = {}
    logger.info("DFLASH: recurrent states are replayed from what draft tokens write (%s=0 keeps them)", SWITCH)
    if (memory := plan.memory) is not None and memory.static_bytes:
        changes = {"mamba_full_memory_ratio": memory.demand.state_share}
        logger.info("DFLASH: --mamba-full-memory-ratio %s", memory.demand.state_share)
    _declare(server_args, enable_linear_replayssm_spec=True, linear_replayssm_cache_len=plan.records, **changes)


@cache
def this_machine(base_gpu_id: int) -> Machine:
    if on_our_cpu_platform():
        return CPU
    machine = find_gpu(base_gpu_id) or UNKNOWN_GPU
    if machine.memory is None:
        logger.warning(
            "DFLASH: could not read the memory of %s from nvidia-smi or torch; cannot estimate how many requests fit, "
            "so recurrent states are kept (%s=1 replays them)",
            machine.name,
            SWITCH,
        )
    elif machine.told_by == "torch":
        logger.warning(
            "DFLASH: nvidia-smi does not give the memory of this GPU; by torch, %s has %s",
            machine.name,
            size(machine.memory),
        )
    return machine


def _say(findings: Iterable[Finding]) -> None:
    found = list(findings)
    raise_first_error(found)
    for finding in found:
        if finding.level != "ok":
            logger.warning("DFLASH: %s", finding)


def _declare(server_args: ServerArgs, **changes: Any) -> None:
    declare_resolution(server_args, _SOURCE, **changes)


def _dflash_is_asked_for(server_args: ServerArgs) -> bool:
    return str(resolving_view(server_args).speculative_algorithm).upper() == "DFLASH"
