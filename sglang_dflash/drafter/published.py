"""The published pairs and the figures of their model cards."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """The model cards' figures by target, with names and the setup they were measured with.

    ``thinking`` is None where the card does not say.
    """
    pairs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    return pairs


def card_of_drafter(name_or_path: str) -> dict[str, Any] | None:
    """The card of a drafter by its repository's name, wherever its files lie; None if it is no published one."""
    last = Path(name_or_path).name.lower()
    return next((card for card in published_pairs().values() if Path(card["drafter"]).name.lower() == last), None)


def accept_lengths(card: dict[str, Any], block: int) -> tuple[int, dict[str, float]]:
    """A card's accept lengths by task, at the stated block nearest to ``block`` -> that block, and they."""
    rows = [row for row in card["accept"] if row["arm"] == "dflash"]
    near = min((row["block"] for row in rows), key=lambda stated: abs(stated - block), default=block)
    return near, {row["task"]: row["accept_length"] for row in rows if row["block"] == near}


def cheapest_step(card: dict[str, Any] | None, block: int) -> float:
    """The least that a step of ``block`` positions costs one user, in plain steps: accept length over speed-up.

    By the card, at its stated block nearest to ``block``; by all cards if it has no speeds, or is None.
    """

    def costs(of: dict[str, Any]) -> list[float]:
        near, lengths = accept_lengths(of, block)
        rows = (row for row in of["speed"] if (row["arm"], row["block"], row["concurrency"]) == ("dflash", near, 1))
        return [lengths[row["task"]] / row["speedup"] for row in rows if row["task"] in lengths]

    own = costs(card) if card else []
    return min(own or itertools.chain.from_iterable(map(costs, published_pairs().values())))
