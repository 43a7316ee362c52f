"""Published pairs: ``--speculative-draft-model-path auto``, and the figures of their model cards."""

from __future__ import annotations

import json
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError

AUTO = "auto"
_SIMILAR = 0.3  # of names


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """Return the model cards by target. ``thinking`` is None if the card does not state it."""
    pairs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    return pairs


@cache
def published_drafters() -> dict[str, str]:
    """Return drafters by target repository, quantised targets included."""
    cards = published_pairs().values()
    return {target: card["drafter"] for card in cards for target in (card["target"], *card.get("also", ()))}


def drafter_of(target: str) -> str:
    """Return the drafter that ``auto`` means; DFlashError for a target without a published one."""
    known = published_drafters()
    if target in known:
        return known[target]
    by_name = {Path(each).name.lower(): each for each in known}
    near = [by_name[name] for name in get_close_matches(Path(target).name.lower(), by_name, 3, _SIMILAR)]
    raise DFlashError(
        f"--speculative-draft-model-path {AUTO}: no drafter is published for {target}",
        remedy=f"name the drafter, name a target with one (such as {', '.join(near or list(known)[:3])}), or leave "
        "the flag out to copy repeated text without a drafter",
    )


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
    others = {Path(name).name.lower() for name, own in published_drafters().items() if card and own != card["drafter"]}
    return str(card["target"]) if card and served in others else None
