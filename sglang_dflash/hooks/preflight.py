"""The server's own preflight: the pair is checked while flags are resolved, before any process or weight.

SGLang's plugin loader swallows what plugins raise; an exception in flag resolution stops the server instead,
with a non-zero exit status and no child processes to clean up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from sglang_dflash.check.backends import needs_bfloat16_states
from sglang_dflash.check.findings import raise_first_error
from sglang_dflash.check.preflight import preflight
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.view import plain_view
from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks import adaptive, disaggregation, state_replay
from sglang_dflash.hooks.environment import explain_environment
from sglang_dflash.hooks.takeover import builtin_requested, reason_for_builtin
from sglang_dflash.memory.machine import CPU, UNKNOWN_GPU, Machine, find_gpu
from sglang_dflash.upstream import (
    CUDA_SYMBOLS,
    HookRegistry,
    check_symbols,
    check_version,
    declare_resolution,
    resolving_view,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs

logger = logging.getLogger(__name__)


def after_model_paths(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_model_source_paths``, the first step that knows both model paths."""
    previous(server_args)
    check_before_weights(server_args)
    load_plain_form(server_args)


def before_speculation(server_args: ServerArgs, previous: Callable[[ServerArgs], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``, which knows device and parallelism."""
    ours = _dflash_is_asked_for(server_args) and reason_for_builtin(server_args) is None
    if ours:
        adaptive.take_over(server_args)
        disaggregation.choose_schedule(server_args)
    previous(server_args)
    if ours:
        adaptive.check_widths(server_args)
        state_replay.choose(server_args)


def check_before_weights(server_args: ServerArgs) -> None:
    """Check what DFLASH is about to serve, and log what the cards' variables became.

    Raises:
        DFlashError: the first thing that cannot work.
    """
    if not _dflash_is_asked_for(server_args):
        return
    for line in explain_environment():
        logger.warning("DFLASH: %s", line)
    if builtin_requested():
        return
    args, machine = resolving_view(server_args), CPU if on_our_cpu_platform() else find_gpu() or UNKNOWN_GPU
    check_sglang(machine)
    refuse_unapplied_hooks()
    findings = preflight(args, machine).findings
    raise_first_error(findings)
    for finding in findings:
        if finding.level != "ok":
            logger.warning("DFLASH: %s", finding)
    if needs_bfloat16_states(args, machine):
        declare_resolution(server_args, "sglang_dflash.check", mamba_ssm_dtype="bfloat16")


def load_plain_form(server_args: ServerArgs) -> None:
    """Let SGLang load a drafter that another trainer wrote from a folder with its plain form.

    Raises:
        DFlashError: the folder cannot be written.
    """
    args = resolving_view(server_args)
    path = args.speculative_draft_model_path
    if not path or builtin_requested() or not _dflash_is_asked_for(server_args):
        return
    if view := plain_view(ModelFiles(path, args.speculative_draft_model_revision)):
        logger.warning("DFLASH: the drafter %s is loaded from its plain form in %s", path, view)
        declare_resolution(
            server_args,
            "sglang_dflash.drafter",
            speculative_draft_model_path=str(view),
            speculative_draft_model_revision=None,
        )


@cache
def check_sglang(machine: Machine) -> None:
    """Refuse an SGLang that this package does not fit, once in a launching process.

    It takes 0.2 s: nearly all modules have been loaded by then, to put hooks into them.

    Raises:
        DFlashError: its version was not tested, or naming everything that it lacks.
    """
    if note := check_version():
        logger.warning("DFLASH: %s", note)
    if machine == CPU:
        from sglang_dflash.cpu.replacements import TABLE

        check_symbols(row.target for row in TABLE)
    else:
        check_symbols(CUDA_SYMBOLS.values() if machine.capability else ())


def refuse_unapplied_hooks() -> None:
    """SGLang only logs a hook that it could not apply, and would go on with its own worker.

    Raises:
        DFlashError: naming every target of ours that is not in place.
    """
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


def _dflash_is_asked_for(server_args: ServerArgs) -> bool:
    return str(resolving_view(server_args).speculative_algorithm).upper() == "DFLASH"
