"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's loader catches and logs whatever a plugin raises, so nothing that can fail for a user's reason
happens here: versions, flags and pairs are checked where an exception still stops the server (flag
resolution, worker construction).
"""

from __future__ import annotations

from sglang_dflash import takeover
from sglang_dflash.cpu import is_active

_registered = False

# target, function, how it is applied (a name of SGLang's HookType)
HOOKS = (("sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker", takeover.choose_worker, "AROUND"),)


def register() -> None:
    """Register every hook; a second call in one process does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    from sglang_dflash.upstream import HookRegistry, HookType

    for target, function, how in HOOKS:
        HookRegistry.register(target, function, HookType[how])
    if is_active():
        from sglang_dflash.cpu import install

        install()
