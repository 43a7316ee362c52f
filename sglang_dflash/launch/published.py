"""Published pairs: ``--speculative-draft-model-path auto``, and the figures of their model cards."""

import json
import os
import re
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError

AUTO = "auto"
_SIMILAR = 0.3  # similarity of names that are suggested
# the end of a quantised variant's name, such as -FP8-dynamic, -AWQ-4bit or -quantized.w4a16
_QUANTISED = re.compile(r"[-_.](?:(?:nv|mx)?fp[48]|awq|gptq|u?int[48]|w[48]a(?:4|8|16)|[48]-?bit|quantized|bnb).*$")


@cache
def published_pairs() -> dict[str, dict[str, Any]]:
    """Return the model cards by target. ``thinking`` is None if the card does not state it."""
    pairs: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
    return pairs


def model_name(name_or_path: str) -> str:
    """Return the last part of a hub id or path in lower case; of a snapshot in the hub's cache, the repository's."""
    parts = os.path.abspath(name_or_path).split("/")  # a Path interns its parts: names of others would stay in memory
    cached = next((part for part in reversed(parts) if part.startswith("models--")), parts[-1])
    return cached.rpartition("--")[2].lower()


def base_name(name_or_path: str) -> str:
    """Return a model's name without the suffix of a quantised variant."""
    return _QUANTISED.sub("", model_name(name_or_path))


def card_of_target(name_or_path: str) -> dict[str, Any] | None:
    """Return the card for a target or its base model. Case, owner and folder do not matter."""
    wanted = base_name(name_or_path)
    return next((card for card in published_pairs().values() if model_name(card["target"]) == wanted), None)


def parsers_of(target: str) -> dict[str, str]:
    """Return SGLang's parsers for a target's thoughts and calls, by argument. SGLang's cookbook names them."""
    found: dict[str, str] = (card_of_target(target) or {}).get("parsers", {})
    return found


def card_of_drafter(name_or_path: str) -> dict[str, Any] | None:
    wanted = model_name(name_or_path)
    cards = published_pairs().values()
    return next((card for card in cards if wanted in map(model_name, (card["drafter"], *card.get("others", ())))), None)


def drafter_of(target: str) -> str:
    """Return the drafter that ``auto`` means; DFlashError for a target without a known one."""
    if card := card_of_target(target):
        return str(card["drafter"])
    by_name = {model_name(card["target"]): card["target"] for card in published_pairs().values()}
    near = [by_name[name] for name in get_close_matches(base_name(target), by_name, 3, _SIMILAR)]
    raise DFlashError(
        f"--speculative-draft-model-path {AUTO}: this release knows no drafter for {target}, only for other targets "
        f"such as {', '.join(near or [*by_name.values()][:3])}",
        remedy="name the drafter, or leave the flag out to copy repeated text without one",
    )


def accept_lengths(card: dict[str, Any], block: int) -> tuple[int, dict[str, float]]:
    """Return the card's block size nearest to ``block``, and its accept lengths there by task."""
    rows = [row for row in card["accept"] if row["arm"] == "dflash"]
    near = min((row["block"] for row in rows), key=lambda stated: abs(stated - block), default=block)
    return near, {row["task"]: row["accept_length"] for row in rows if row["block"] == near}


def other_target(drafter: str, target: str) -> str | None:
    """Return a published drafter's target if ``target``, a name or path, is another published target."""
    card, served = card_of_drafter(drafter), card_of_target(target)
    return str(card["target"]) if card and served and served is not card else None
