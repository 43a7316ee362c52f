"""``/server_info`` shows our worker under a key of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_dflash.upstream import Scheduler

SERVER_INFO_KEY = "sglang_dflash"


def report_worker(result: Any, scheduler: Scheduler, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add our worker's identity and counters."""
    worker = scheduler.draft_worker
    if hasattr(type(worker), "server_info"):
        result.internal_state[SERVER_INFO_KEY] = worker.server_info()
    return result
