"""One line of a preflight: what was looked at, what was found, and whether it stops the server.

A rule is a function that returns what it found, or raises :class:`DFlashError` or :class:`Doubt`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, ParamSpec

from sglang_dflash.errors import DFlashError, Doubt, printable

Parameters = ParamSpec("Parameters")


@dataclass(frozen=True)
class Finding:
    """A checked fact.

    Attributes:
        expected, remedy: empty if ``level`` is ``ok``.
        estimated: whether it rests on estimated sizes, which may be wrong: a server warns of it and starts.
    """

    level: Literal["ok", "warn", "error"]
    about: str
    value: str
    expected: str = ""
    remedy: str = ""
    estimated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", printable(self.value))  # it may quote a file

    def __str__(self) -> str:
        return f"{self.value}. Expected: {self.expected}. Remedy: {self.remedy}."


def judge(about: str, rule: Callable[Parameters, str], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Finding:
    """The finding of one rule."""
    try:
        return Finding("ok", about, rule(*args, **kwargs))
    except DFlashError as raised:
        return of_error(about, raised)


def of_error(about: str, raised: DFlashError) -> Finding:
    """The finding that says what an exception said."""
    return Finding(
        "warn" if isinstance(raised, Doubt) else "error", about, raised.value, raised.expected, raised.remedy
    )


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Stop at the first error that does not rest on an estimate.

    Raises:
        DFlashError: with the value, expectation and remedy of that finding.
    """
    for finding in findings:
        if finding.level == "error" and not finding.estimated:
            raise DFlashError(finding.value, expected=finding.expected, remedy=finding.remedy)
