"""One line of a preflight: what was looked at, what was found, and whether it stops the server."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from sglang_dflash.errors import DFlashError

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True)
class Finding:
    """A checked fact.

    Attributes:
        expected, remedy: empty if ``level`` is ``ok``.
        estimated: whether it rests on estimated sizes, which may be wrong: a server warns of it and starts.
    """

    level: Level
    about: str
    value: str
    expected: str = ""
    remedy: str = ""
    estimated: bool = False

    def __str__(self) -> str:
        return f"{self.value}. Expected: {self.expected}. Remedy: {self.remedy}."


def ok(about: str, value: str) -> Finding:
    return Finding("ok", about, value)


def warn(about: str, value: str, *, expected: str, remedy: str) -> Finding:
    return Finding("warn", about, value, expected, remedy)


def error(about: str, value: str, *, expected: str, remedy: str) -> Finding:
    return Finding("error", about, value, expected, remedy)


def of_error(about: str, raised: DFlashError) -> Finding:
    """The finding that says what an exception said."""
    return Finding("error", about, raised.value, raised.expected, raised.remedy)


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Stop at the first error that does not rest on an estimate.

    Raises:
        DFlashError: with the value, expectation and remedy of that finding.
    """
    for finding in findings:
        if finding.level == "error" and not finding.estimated:
            raise DFlashError(finding.value, expected=finding.expected, remedy=finding.remedy)
