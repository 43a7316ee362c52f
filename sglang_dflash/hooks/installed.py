"""Whether the installed SGLang is one that this package fits, with all hooks in place."""

from __future__ import annotations

import logging
from functools import cache

from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import CPU, Machine
from sglang_dflash.upstream import CUDA_SYMBOLS, HookRegistry, check_symbols, check_version

logger = logging.getLogger(__name__)


@cache
def check_sglang(machine: Machine) -> None:
    """Refuse an SGLang that this package does not fit; once per launching process.

    It takes 0.2 s: nearly all modules have been loaded by then to put hooks into them.

    Raises:
        DFlashError: the version was not tested, or lacks names that we use; it lists all of them.
    """
    if note := check_version():
        logger.warning("DFLASH: %s", note)
    if machine == CPU:
        from sglang_dflash.cpu.replacements import TABLE

        check_symbols(row.target for row in TABLE)
    else:
        check_symbols(CUDA_SYMBOLS.values() if machine.capability else ())


def refuse_unapplied_hooks() -> None:
    """Refuse to start with a hook missing: SGLang only logs that, and would go on with its own worker.

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
