"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's plugin loader logs whatever a plugin raises and goes on, which for DFLASH would mean SGLang's own worker. So
nothing that can fail for a user's reason happens here (versions, flags and pairs are checked where an exception stops
the server: flag resolution, worker construction), and a package that cannot even register leaves a refusal behind.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang_dflash.errors import DFlashError

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"

_registered = False


def register() -> None:
    """Register every hook; a second call in one process does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register_hooks()
    except Exception as error:  # the loader is the process edge that reports it
        _refuse_dflash(error)
        raise


def _register_hooks() -> None:
    from sglang_dflash.cpu import install, is_active
    from sglang_dflash.hooks import flags, takeover
    from sglang_dflash.hooks.context_length import extend_drafter_context
    from sglang_dflash.hooks.preflight import after_model_paths, before_speculation
    from sglang_dflash.hooks.requests import VALIDATE, refuse_request
    from sglang_dflash.upstream import HookRegistry, HookType, register_resolution_hook
    from sglang_dflash.window.budget import POOL_CONFIG, charge_rings
    from sglang_dflash.window.prefix_cap import MAX_PREFIX, cap_prefix
    from sglang_dflash.worker.observe.info import report_worker

    hooks = (
        (CREATE_WORKER, takeover.choose_worker, HookType.AROUND),
        (VALIDATE, refuse_request, HookType.AROUND),
        (MAX_PREFIX, cap_prefix, HookType.AFTER),
        (POOL_CONFIG, charge_rings, HookType.AROUND),
        ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", report_worker, HookType.AFTER),
        ("sglang.srt.server_args.ServerArgs.add_cli_args", flags.accept_old_flags, HookType.AFTER),
        (
            "sglang.srt.configs.model_config.ModelConfig._derive_context_length",
            extend_drafter_context,
            HookType.BEFORE,
        ),
    )
    for target, function, how in hooks:
        HookRegistry.register(target, function, how)
    register_resolution_hook("handle_model_source_paths")(after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(before_speculation)
    # Only a process that constructs an Engine has the module loaded by now; others need no keywords.
    if engine := sys.modules.get("sglang.srt.entrypoints.engine"):
        flags.accept_old_keywords(engine.Engine)
    if is_active():
        install()


def _refuse_dflash(error: Exception) -> None:
    """Make DFLASH fail with the reason; depends on nothing of ours that may be what failed."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse(original: Any, algorithm: Any, server_args: Any) -> Any:
        if not algorithm.is_dflash():
            return original(algorithm, server_args)
        raise DFlashError(
            f"sglang-dflash could not register with SGLang ({type(error).__name__}: {error})",
            expected="hooks and imports of the SGLang version that this release is tested with",
            remedy="install that version (`sglang-dflash version` names it), or uninstall sglang-dflash",
        ) from error

    HookRegistry.register(CREATE_WORKER, refuse, HookType.AROUND)
