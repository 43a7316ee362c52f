"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's plugin loader logs whatever a plugin raises and goes on, which for DFLASH would mean SGLang's own worker. So
nothing that can fail for a user's reason happens here (versions, flags and pairs are checked where an exception stops
the server: flag resolution, worker construction), and a package that cannot even register leaves a refusal behind.
"""

from __future__ import annotations

import sys
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import SYMBOLS

CREATE_WORKER = "SpeculativeAlgorithm.create_worker"

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
    from sglang_dflash.hooks.requests import refuse_request
    from sglang_dflash.hooks.server_info import report_worker
    from sglang_dflash.upstream import HookRegistry, HookType, register_resolution_hook
    from sglang_dflash.window.budget import charge_rings
    from sglang_dflash.window.prefix_cap import cap_prefix

    for name, function, how in (
        (CREATE_WORKER, takeover.choose_worker, HookType.AROUND),
        ("validate_dflash_request", refuse_request, HookType.AROUND),
        ("Req._compute_max_prefix_len", cap_prefix, HookType.AFTER),
        ("KVCacheConfigurator.config_from_budget", charge_rings, HookType.AROUND),
        ("Scheduler.get_internal_state", report_worker, HookType.AFTER),
        ("ServerArgs.add_cli_args", flags.accept_old_flags, HookType.AFTER),
        ("ModelConfig._derive_context_length", extend_drafter_context, HookType.BEFORE),
    ):
        HookRegistry.register(SYMBOLS[name].path, function, how)
    register_resolution_hook("handle_model_source_paths")(after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(before_speculation)
    # Only a process that constructs an Engine has the module loaded by now; others need no keywords.
    if engine := sys.modules.get(SYMBOLS["Engine.server_args_class"].path.rsplit(".", 2)[0]):
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

    HookRegistry.register(SYMBOLS[CREATE_WORKER].path, refuse, HookType.AROUND)
