"""The server's own preflight: the pair is checked while flags are resolved, before any process or weight.

SGLang's plugin loader swallows what plugins raise; an exception in flag resolution stops the server instead,
with a non-zero exit status and no child processes to clean up.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from sglang_dflash.check.arguments import check_arguments, serving_of
from sglang_dflash.check.backends import check_backends, needs_bfloat16_states
from sglang_dflash.check.findings import Finding, raise_first_error
from sglang_dflash.check.old_flags import explain_environment
from sglang_dflash.check.pair import check_pair
from sglang_dflash.check.weights import check_weights
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.drafter.config import DrafterConfig, foreign_kind
from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.errors import DFlashError
from sglang_dflash.hooks.takeover import builtin_requested, reason_for_builtin, refuse_on_cpu
from sglang_dflash.memory.device import Device, find_device
from sglang_dflash.memory.sizes import is_hybrid
from sglang_dflash.upstream import check_symbols, check_version

logger = logging.getLogger(__name__)


def after_model_paths(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook around ``handle_model_source_paths``, the first step that knows both model paths."""
    previous(server_args)
    check_before_weights(server_args)


def before_speculation(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Resolution hook around ``handle_speculative_decoding``, where device and parallelism are known."""
    refuse_unserved(server_args)
    previous(server_args)


def refuse_unserved(server_args: Any) -> None:
    """Refuse on the CPU platform, before any weight, what only SGLang's own worker serves.

    Raises:
        DFlashError: naming the feature.
    """
    from sglang_dflash.upstream import resolving_view

    asked = str(resolving_view(server_args).speculative_algorithm).upper() == "DFLASH"
    if asked and not builtin_requested() and (reason := reason_for_builtin(server_args)):
        refuse_on_cpu(reason)


def check_before_weights(server_args: Any) -> None:
    """Check what DFLASH is about to serve, and tell what the cards' variables became.

    Raises:
        DFlashError: the first thing that cannot work.
    """
    from sglang_dflash.upstream import declare_resolution, resolving_view

    args = resolving_view(server_args)
    if str(args.speculative_algorithm).upper() != "DFLASH":
        return
    for line in explain_environment(os.environ):
        logger.warning("DFLASH: %s", line)
    if builtin_requested():
        return
    check_sglang()
    refuse_unapplied_hooks()
    device = None if on_our_cpu_platform() else find_device()
    findings = list(findings_for(args, device))
    raise_first_error(findings)
    for finding in findings:
        if finding.level == "warn":
            logger.warning("DFLASH: %s", finding)
    if needs_bfloat16_states(args, device):
        declare_resolution(server_args, "sglang_dflash.check", mamba_ssm_dtype="bfloat16")


@cache
def check_sglang() -> None:
    """Refuse an SGLang that this package does not fit, once in a launching process; a check takes 0.01 s.

    Raises:
        DFlashError: its version was not tested, or naming everything that it lacks.
    """
    check_version()
    if on_our_cpu_platform():
        from sglang_dflash.cpu.replacements import TABLE

        check_symbols(row.target for row in TABLE)
    else:
        check_symbols()


def findings_for(args: Any, device: Device | None) -> Iterator[Finding]:
    """Arguments first, then the pair; nothing after arguments that leave no pair to look at.

    Args:
        args: the server arguments as they were given, by SGLang's names.
        device: the GPU that will serve, None on a CPU.

    Raises:
        DFlashError: a configuration cannot be read, or is not that of a plain DFlash drafter.
    """
    arguments = list(check_arguments(args))
    yield from arguments
    if any(finding.level == "error" for finding in arguments):
        return
    drafter_files = ModelFiles(args.speculative_draft_model_path, args.speculative_draft_model_revision)
    if foreign_kind(drafter_files.config) and not on_our_cpu_platform():
        return  # SGLang's own worker serves it
    overrides = json.loads(args.json_model_override_args)
    drafter = DrafterConfig.from_dict({**drafter_files.config, **overrides})
    target = {**ModelFiles(args.model_path, args.revision).config, **overrides}
    yield from check_pair(drafter, target, serving_of(args))
    if drafter_files.is_local:
        yield check_weights(drafter, drafter_files.tensors())
    yield from check_backends(args, device, hybrid=is_hybrid(target))


def refuse_unapplied_hooks() -> None:
    """SGLang only logs a hook that it could not apply, and would go on with its own worker.

    Raises:
        DFlashError: naming every target of ours that is not in place.
    """
    from sglang_dflash.upstream import HookRegistry

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
