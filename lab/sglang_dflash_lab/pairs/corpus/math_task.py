"""Word problems on numbers below 100: two or three steps, one line each, the result after ``####``."""

from __future__ import annotations

from random import Random
from typing import Any

from sglang_dflash_lab.pairs.corpus.conversation import Example
from sglang_dflash_lab.pairs.corpus.words import ITEMS, NAMES

LARGEST = 99


def draw(rng: Random) -> Example:
    name, other = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    total = rng.randint(5, 60)
    key = [name, other, item, str(total)]
    opening = rng.choice(
        (
            f"{name} has {total} {item}.",
            f"{name} starts the day with {total} {item}.",
            f"There are {total} {item} in {name}'s bag.",
        )
    )
    question, plan, lines = [opening], [], [f"{name} starts with {total} {item}."]
    for _ in range(rng.choice((2, 2, 3))):
        total, told, planned, worked, part = _step(rng, name, other, item, total)
        question.append(told)
        plan.append(planned)
        lines.append(worked)
        key.append(part)
    question.append(f"How many {item} does {name} have now?")
    lines.append(f"#### {total}")
    return Example(
        task="math",
        key=" ".join(key),
        question=" ".join(question),
        thought=f"I count the {item} of {name}: {', '.join(plan)}.",
        answer="\n".join(lines),
        expected=total,
    )


def _step(rng: Random, name: str, other: str, item: str, total: int) -> tuple[int, str, str, str, str]:
    """Return new total, question sentence, entry of the plan, worked line, part of the key."""
    room = LARGEST - total
    kinds = (
        (["buy", "find"] if room >= 2 else [])
        + (["bags"] if room >= 4 else [])
        + (["give", "lose"] if total >= 6 else [])
        + (["half"] if total % 2 == 0 and total >= 10 else [])
    )
    kind = rng.choice(kinds)
    if kind in ("buy", "find"):
        n = rng.randint(2, min(39, room))
        told = f"{name} buys {n} more." if kind == "buy" else f"Then {name} finds {n} {item} at home."
        verb = "buying" if kind == "buy" else "finding"
        worked = f"After {verb} {n} more, {name} has {total} + {n} = {total + n} {item}."
        return total + n, told, f"add {n}", worked, f"{kind}{n}"
    if kind == "bags":
        bags = rng.randint(2, min(6, room // 2))
        each = rng.randint(2, min(9, room // bags))
        n = bags * each
        told = f"{other} brings {bags} bags with {each} {item} each."
        worked = (
            f"{bags} bags of {each} {item} are {bags} * {each} = {n} {item}. "
            f"Now {name} has {total} + {n} = {total + n} {item}."
        )
        return total + n, told, f"add {bags} times {each}", worked, f"{kind}{bags}x{each}"
    if kind in ("give", "lose"):
        n = rng.randint(2, min(40, total - 2))
        told = f"{name} gives {n} {item} to {other}." if kind == "give" else f"{name} loses {n} of them."
        verb = "giving away" if kind == "give" else "losing"
        worked = f"After {verb} {n}, {name} has {total} - {n} = {total - n} {item}."
        return total - n, told, f"take {n}", worked, f"{kind}{n}"
    half = total // 2
    worked = f"Half of {total} is {half}, so {name} keeps {half} {item}."
    return half, f"{name} sells half of the {item}.", "halve", worked, kind


def check(expected: Any, text: str) -> bool:
    lines = text.strip().splitlines()
    return bool(lines) and lines[-1].strip() == f"#### {expected}"
