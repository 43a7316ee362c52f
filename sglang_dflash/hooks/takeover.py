"""Refuse an SGLang that this package does not fit; in one that it fits, serve DFLASH with our worker class."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

from sglang_dflash import upstream
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.machine import CPU, Machine
from sglang_dflash.plan import serving
from sglang_dflash.plan.decide import reason_for_builtin, resolved
from sglang_dflash.upstream import CUDA_SYMBOLS, HookRegistry, check_symbols, check_version

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs, SpeculativeAlgorithm


logger = logging.getLogger(__name__)


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: our class for DFLASH, SGLang's for the rest.

    From here on this process knows the plan that it serves.

    Raises:
        DFlashError: as :func:`~sglang_dflash.plan.decide.reason_for_builtin`.
    """
    if not algorithm.is_dflash():
        return original(algorithm, server_args)
    args = upstream.resolving_view(server_args)
    reason = reason_for_builtin(args, on_cpu=on_our_cpu_platform())
    if reason is None:
        serving.plan = resolved(args, server_args)
        return our_worker()
    serving.plan = None
    logger.warning("DFLASH is served by SGLang's own worker, not by sglang-dflash: %s", reason)
    return original(algorithm, server_args)


def our_worker() -> type:
    """Our worker class, with our drafter in the registry that its model loader asks."""
    from sglang_dflash.model.drafter import DFlashDraftModel
    from sglang_dflash.worker.worker import DFlashWorker

    upstream.check_version()
    upstream.ModelRegistry.models[DFlashDraftModel.__name__] = DFlashDraftModel
    return DFlashWorker


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
