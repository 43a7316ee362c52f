"""The published pairs and the figures of their model cards."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """The model cards' figures by target, with names and the setup they were measured with."""
    pairs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    return pairs


def card_of_drafter(name_or_path: str) -> dict[str, Any] | None:
    """The card of a drafter by its repository's name, wherever its files lie; None if it is no published one."""
    last = Path(name_or_path).name.lower()
    return next((card for card in published_pairs().values() if Path(card["drafter"]).name.lower() == last), None)
