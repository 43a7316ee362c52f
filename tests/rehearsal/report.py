"""What a rehearsal saw, added to the scheduler's state, from where ``Engine.get_server_info`` reads it."""

from __future__ import annotations

import collections
from typing import Any

from tests.rehearsal.interpreter import COMPILED, LAUNCHES

# Captured graphs: "target 4, width 8" (role, batch size, width) to its nodes and how many of them are kernel launches.
GRAPHS: dict[str, dict[str, int]] = {}
# "target 4" to the number of its replays; "prefill" to those of the target's prefill.
REPLAYS: collections.Counter[str] = collections.Counter()
# "target 8" (role, width) to the number of its replays.
WIDTHS: collections.Counter[str] = collections.Counter()
# "target 4" to its forwards without a graph.
EAGER: collections.Counter[str] = collections.Counter()
# "target 8" (role, width) to its forwards without a graph.
EAGER_WIDTHS: collections.Counter[str] = collections.Counter()
# Kernels that were compiled before the server took requests.
_AT_START: set[str] = set()
# Anything else that a scenario must have met: "retracted", "mixed batches".
EVENTS: collections.Counter[str] = collections.Counter()


def add(result: Any, *_: Any) -> Any:
    """After ``Scheduler.get_internal_state``."""
    seen = {
        "launches": LAUNCHES,
        "graphs": GRAPHS,
        "replays": REPLAYS,
        "widths": WIDTHS,
        "eager": EAGER,
        "eager widths": EAGER_WIDTHS,
        "events": EVENTS,
        "compiled late": dict.fromkeys(COMPILED - _AT_START, 1),
    }
    result.internal_state["rehearsal"] = {name: dict(values) for name, values in seen.items()}
    return result


def started() -> None:
    """In place of ``mark_serving_started``."""
    _AT_START.update(COMPILED)


def retracted(result: Any, *_: Any, **__: Any) -> None:
    """After ``ScheduleBatch.retract_decode``."""
    EVENTS["retracted"] += len(result[0])


def mixed(result: Any, *_: Any, **__: Any) -> None:
    """After ``ScheduleBatch.mix_with_running``."""
    EVENTS["mixed batches"] += 1


def prefilled(result: Any, batch: Any, *_: Any, **__: Any) -> None:
    """After ``ScheduleBatch.prepare_for_extend``."""
    EVENTS["cached tokens"] += sum(batch.prefix_lens)
