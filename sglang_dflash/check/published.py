"""Published pairs and the figures of their model cards."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """Return the model cards by target. ``thinking`` is None if the card does not state it."""
    pairs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    return pairs


def card_of_drafter(name_or_path: str) -> dict[str, Any] | None:
    last = Path(name_or_path).name.lower()
    return next((card for card in published_pairs().values() if Path(card["drafter"]).name.lower() == last), None)


def accept_lengths(card: dict[str, Any], block: int) -> tuple[int, dict[str, float]]:
    """Return the card's block size nearest to ``block``, and its accept lengths there by task."""
    rows = [row for row in card["accept"] if row["arm"] == "dflash"]
    near = min((row["block"] for row in rows), key=lambda stated: abs(stated - block), default=block)
    return near, {row["task"]: row["accept_length"] for row in rows if row["block"] == near}


def other_target(drafter: str, target: str) -> str | None:
    """Return a published drafter's target if ``target``, a name or path, is another published target."""
    card, served = card_of_drafter(drafter), Path(target).name.lower()
    others = {Path(other["target"]).name.lower() for other in published_pairs().values() if other is not card}
    return str(card["target"]) if card and served in others else None
