"""What a user of this package sees: the one error, and the findings of a preflight."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, ParamSpec

Parameters = ParamSpec("Parameters")
Level = Literal["ok", "note", "warn", "error"]
LONGEST = 4000  # characters of each part of an error, which may quote a whole file


class DFlashError(ValueError):
    """A pair, flag, version or environment that cannot be served.

    Args:
        value: what was found, in the user's terms (``"block_size 64 (--speculative-num-draft-tokens)"``).
        expected: what would have been accepted.
        remedy: the next thing to do, as an instruction.
    """

    def __init__(self, value: str, *, expected: str, remedy: str) -> None:
        self.value, self.expected, self.remedy = printable(value), printable(expected), remedy
        super().__init__(f"sglang-dflash: {self.value}. Expected: {self.expected}. Fix: {self.remedy}.")

    def __reduce__(self) -> tuple[object, ...]:  # exceptions with keyword arguments do not pickle
        return (_rebuild, (type(self), self.value, self.expected, self.remedy))


class Doubt(DFlashError):
    """A warning about a pair or flag, which is served nevertheless."""


class Note(Doubt):
    """A remark that needs no action, and never changes the exit status of ``check``."""


def printable(text: str) -> str:
    """Escape control characters, which could forge log lines or drive a terminal, and surrogates; cut long text."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@dataclass(frozen=True)
class Finding:
    """One checked fact.

    Attributes:
        about: what was checked.
        value, expected, remedy: as of :class:`DFlashError`; the last two are empty if ``level`` is ``ok``.
        estimated: whether it depends on estimated sizes: a server logs it as a warning and starts.
    """

    level: Level
    about: str
    value: str
    expected: str = ""
    remedy: str = ""
    estimated: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", printable(self.value))  # it may quote a file

    def __str__(self) -> str:
        return f"{self.value}. Expected: {self.expected}. Fix: {self.remedy}."

    @classmethod
    def of(cls, about: str, error: DFlashError, *, estimated: bool = False) -> Finding:
        level: Level = "note" if isinstance(error, Note) else "warn" if isinstance(error, Doubt) else "error"
        return cls(level, about, error.value, error.expected, error.remedy, estimated)


def judge(about: str, rule: Callable[Parameters, str], *args: Parameters.args, **kwargs: Parameters.kwargs) -> Finding:
    """Return the finding of a rule, which returns what it found, or raises :class:`DFlashError` or :class:`Doubt`."""
    try:
        return Finding("ok", about, rule(*args, **kwargs))
    except DFlashError as error:
        return Finding.of(about, error)


def raise_first_error(findings: Iterable[Finding]) -> None:
    """Raise the first error that does not depend on an estimate as a :class:`DFlashError`."""
    for finding in findings:
        if finding.level == "error" and not finding.estimated:
            raise DFlashError(finding.value, expected=finding.expected, remedy=finding.remedy)


def _rebuild(kind: type[DFlashError], value: str, expected: str, remedy: str) -> DFlashError:
    return kind(value, expected=expected, remedy=remedy)


@contextmanager
def user_errors() -> Iterator[None]:
    """Print a DFlashError as one message without a traceback, and exit with status 2."""
    import typer

    try:
        yield
    except DFlashError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(2) from None
