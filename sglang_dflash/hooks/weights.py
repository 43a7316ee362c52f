"""Weight updates: those of the target leave the drafter as it is."""

from __future__ import annotations

from typing import Any

from sglang_dflash.plan import serving

EVERYONE, TARGET = "all", "target"


def spare_drafter(result: list[tuple[str, Any]], _: Any, selector: str = EVERYONE) -> list[tuple[str, Any]]:
    """Hook after ``SchedulerWeightUpdaterManager._select_runners``: whoever asks for all models means the target.

    SGLang would load the same tensors into both. A drafter as wide as its target has tensors of the same names and
    shapes, and would draft with the target's; any other name ends the server. ``"draft"`` still means the drafter.

    Args:
        result: role and runner of each selected model.
    """
    if selector != EVERYONE or serving.plan is None:
        return result
    return [(role, runner) for role, runner in result if role == TARGET]
