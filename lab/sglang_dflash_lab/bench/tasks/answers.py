"""Grade an answer: exact match of a final number or formula, or a program that passes its tests in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sglang_dflash_lab.bench.tasks.sandbox import run_program

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


_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
_PASSED = "all tests passed"


def code_block(text: str, function: str | None = None) -> str:
    """The last fenced block of the final answer, preferring one that defines ``function``; else the whole answer."""
    answer = final_answer(text)
    blocks: list[str] = _BLOCK.findall(answer)
    defining = [block for block in blocks if function and f"def {function}" in block]
    return (defining or blocks or [answer])[-1]


def passes(source: str, tests: str) -> bool:
    """Whether ``source`` followed by ``tests`` runs to its end in the sandbox."""
    # A program that exits early must not pass, so the proof is a line printed after the last test.
    outcome = run_program(f"{source}\n{tests}\nprint({_PASSED!r})\n")
    return outcome.ok and outcome.stdout.rstrip().endswith(_PASSED)


def passes_cases(source: str, cases: Sequence[dict[str, str]], function: str | None) -> bool:
    """Whether a LiveCodeBench program passes its test cases.

    Args:
        cases: ``input``, ``output`` and ``testtype`` (``stdin`` or ``functional``) each.
        function: method of ``Solution`` that functional cases call, their arguments one JSON value per line.
    """
    return all(_passes_case(source, case, function) for case in cases)


def _passes_case(source: str, case: dict[str, str], function: str | None) -> bool:
    if case["testtype"] == "stdin":
        outcome = run_program(source, stdin=case["input"])
        return outcome.ok and _lines(outcome.stdout) == _lines(case["output"])
    arguments: list[Any] = [json.loads(line) for line in case["input"].splitlines() if line.strip()]
    test = f"assert Solution().{function}(*{arguments!r}) == {json.loads(case['output'])!r}\n"
    return passes("from typing import *\n" + source, test)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
