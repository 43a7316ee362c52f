"""Give SGLang our worker class for ``--speculative-algorithm DFLASH``."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_dflash import upstream
from sglang_dflash.cpu import is_active as on_our_cpu_platform
from sglang_dflash.plan import serving
from sglang_dflash.plan.decide import resolved
from sglang_dflash.plan.who import reason_for_builtin

if TYPE_CHECKING:
    from sglang_dflash.upstream import ServerArgs, SpeculativeAlgorithm

logger = logging.getLogger(__name__)


def choose_worker(original: Callable[..., type], algorithm: SpeculativeAlgorithm, server_args: ServerArgs) -> type:
    """Hook around ``SpeculativeAlgorithm.create_worker``: our class for DFLASH, SGLang's for the rest.

    From here on this process knows the plan that it serves.

    Raises:
        DFlashError: as :func:`~sglang_dflash.plan.who.reason_for_builtin`.
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
