"""Let rank 0's step times ride on the requests' broadcast (:mod:`sglang_dflash.worker.shared_times`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.plan import serving


def ride_on_requests(
    original: Callable[..., list[Any]], receiver: Any, recv_reqs: list[Any] | None, local_reqs: Any = None
) -> list[Any]:
    """Hook around ``SchedulerRequestReceiver._broadcast_reqs_across_ranks``."""
    if serving.plan is None:
        return original(receiver, recv_reqs, local_reqs)
    from sglang_dflash.worker import shared_times

    times = shared_times.serving()
    if times is None:  # the worker is not built yet
        return original(receiver, recv_reqs, local_reqs)
    return times.ride(lambda requests: original(receiver, requests, local_reqs), recv_reqs)
