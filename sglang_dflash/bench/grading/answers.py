r"""Exact match of a final answer: the last ``\boxed{…}``, else the last number."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?|-?\.\d+")
_THOUGHT_END = "</think>"
_DROPPED = re.compile(r"\\left|\\right|\\[!,;: ]|\\text\{[^}]*\}|\\mbox\{[^}]*\}|\^\{?\\circ\}?|\\\$|\\%|[\s$%]")
_SHORT_FRACTION = re.compile(r"\\frac(\d)(\d)")


def final_answer(text: str) -> str:
    """The text after the thought, if the model thinks aloud."""
    return text.rpartition(_THOUGHT_END)[2]


def boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{…}``, braces balanced; None without one."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for position in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[begin:position]
    return None


def same_number(expected: str, text: str) -> bool:
    """Whether the boxed answer, or else the last number of the text, is the expected number."""
    answer = final_answer(text)
    candidates = _NUMBER.findall(boxed(answer) or answer)
    return bool(candidates) and _to_number(candidates[-1]) == _to_number(expected)


def same_formula(expected: str, text: str) -> bool:
    """Whether the boxed answer is the expected formula, up to spelling.

    Spaces, ``\\left``, units in ``\\text{}``, dollars, percent and degree signs do not count; ``\\dfrac`` is
    ``\\frac``; numbers compare as numbers. Equal formulas of different form count as wrong: this is a lower bound.
    """
    answer = boxed(final_answer(text))
    if answer is None:
        return False
    found, wanted = _normalised(answer), _normalised(expected)
    if found == wanted:
        return True
    return (
        _NUMBER.fullmatch(found) is not None
        and _NUMBER.fullmatch(wanted) is not None
        and (_to_number(found) == _to_number(wanted))
    )


def _normalised(formula: str) -> str:
    formula = _DROPPED.sub("", formula.replace("dfrac", "frac").replace("tfrac", "frac"))
    return _SHORT_FRACTION.sub(r"\\frac{\1}{\2}", formula).rstrip(".")


def _to_number(text: str) -> float:
    return float(text.replace(",", ""))
