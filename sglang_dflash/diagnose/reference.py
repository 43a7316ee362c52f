"""What a drafter should reach: the figures of its model card, or those stored with a tiny pair."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, published_pairs

# The public benchmarks that ask like a task of the probes.
_LIKE = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench", "alpaca")}


@dataclass(frozen=True)
class Reference:
    """Accept lengths to compare with.

    Attributes:
        source: where they stand.
        thinking: whether thinking was on; None if that is not known.
        block: width that they are of.
        lengths: by task of the probes; may be empty.
    """

    source: str
    thinking: bool | None
    block: int
    lengths: Mapping[str, float]


def find(drafter: str, block: int) -> Reference | None:
    """The figures of a drafter, by its path or repository, at the stated block nearest to ``block``."""
    if card := card_of_drafter(drafter):
        near, stated = accept_lengths(card, block)
        like = {task: [stated[name] for name in names if name in stated] for task, names in _LIKE.items()}
        return Reference(
            card["card"], card["thinking"], near, {task: mean(found) for task, found in like.items() if found}
        )
    stored = Path(drafter, "provenance.json")
    measured = json.loads(stored.read_text()).get("accept_lengths") if stored.exists() else None
    if measured is None:
        return None
    figures = {task: row["accept_length"] for task, row in measured.items()}
    near = min(map(int, figures["math"]), key=lambda width: abs(width - block))
    lengths = {task: by_block[str(near)] for task, by_block in figures.items()}
    return Reference("`sglang-dflash pairs list`", False, near, lengths)


def other_target(drafter: str, target: str) -> str | None:
    """The target that a published drafter is for, if the served one is another published target."""
    card, served = card_of_drafter(drafter), Path(target).name.lower()
    others = {Path(other["target"]).name.lower() for other in published_pairs().values() if other is not card}
    return str(card["target"]) if card and served in others else None
