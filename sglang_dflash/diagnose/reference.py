"""What a drafter should reach: the figures of its model card, or those stored with a tiny pair."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, published_pairs
from sglang_dflash.pairs import NAMES, drafter_kinds
from sglang_dflash.pairs.table import pair_figures

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
    pair, kind = Path(drafter).parent.name, Path(drafter).name.removeprefix("drafter-")
    if card := card_of_drafter(drafter):
        near, stated = accept_lengths(card, block)
        like = {task: [stated[name] for name in names if name in stated] for task, names in _LIKE.items()}
        return Reference(
            card["card"], card["thinking"], near, {task: mean(found) for task, found in like.items() if found}
        )
    if pair not in NAMES or kind not in drafter_kinds(pair):
        return None
    figures = {t: row["accept_length"] for t, row in pair_figures(pair)["drafters"][kind]["accept_lengths"].items()}
    near = min(map(int, figures["math"]), key=lambda width: abs(width - block))
    lengths = {task: by_block[str(near)] for task, by_block in figures.items()}
    return Reference("`sglang-dflash pairs list`", False, near, lengths)


def other_target(drafter: str, target: str) -> str | None:
    """The target that a published drafter is for, if the served one is another published target."""
    card, served = card_of_drafter(drafter), Path(target).name.lower()
    others = {Path(other["target"]).name.lower() for other in published_pairs().values() if other is not card}
    return str(card["target"]) if card and served in others else None
