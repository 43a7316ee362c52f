"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's loader catches and logs whatever a plugin raises, so nothing that can fail for a user's reason
happens here: versions, flags and pairs are checked where an exception still stops the server (flag
resolution, worker construction).
"""

from __future__ import annotations

import sys

from sglang_dflash import flags, takeover
from sglang_dflash.check.server import check_before_weights
from sglang_dflash.cpu import is_active
from sglang_dflash.drafter_context import extend_drafter_context

_registered = False

# target, function, how it is applied (a name of SGLang's HookType)
HOOKS = (
    ("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", takeover.choose_worker, "AROUND"),
    ("sglang.srt.server_args.ServerArgs.add_cli_args", flags.accept_old_flags, "AFTER"),
    ("sglang.srt.configs.model_config.ModelConfig._derive_context_length", extend_drafter_context, "BEFORE"),
)


def register() -> None:
    """Register every hook; a second call in one process does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang_dflash.upstream import HookRegistry, HookType, register_resolution_hook

    for target, function, how in HOOKS:
        HookRegistry.register(target, function, HookType[how])
    register_resolution_hook("handle_model_source_paths")(check_before_weights)
    # Only a process that constructs an Engine has the module loaded by now; others need no keywords.
    if engine := sys.modules.get("sglang.srt.entrypoints.engine"):
        flags.accept_old_keywords(engine.Engine)
    if is_active():
        from sglang_dflash.cpu import install

        install()
