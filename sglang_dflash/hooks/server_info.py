"""``/server_info`` shows our worker under a key of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.served import our_worker_serves

if TYPE_CHECKING:
    from sglang_dflash.upstream import Scheduler

SERVER_INFO_KEY = "sglang_dflash"


def report_worker(result: Any, scheduler: Scheduler, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``: add our worker's identity and counters."""
    if our_worker_serves():
        result.internal_state[SERVER_INFO_KEY] = scheduler.draft_worker.server_info()
    return result
