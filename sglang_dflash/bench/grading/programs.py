"""Generated Python: find it in an answer, run it against tests in the sandbox."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sglang_dflash.bench.grading.answers import final_answer
from sglang_dflash.bench.grading.sandbox import run_program

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
