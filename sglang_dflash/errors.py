"""The one error that a user of this package sees: what was found, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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
        super().__init__(f"sglang-dflash: {self.value}. Expected: {self.expected}. Remedy: {self.remedy}.")

    def __reduce__(self) -> tuple[object, ...]:  # exceptions with keyword arguments do not pickle
        return (_rebuild, (type(self), self.value, self.expected, self.remedy))


class Doubt(DFlashError):
    """A warning about a pair or flag, which is served nevertheless."""


def printable(text: str) -> str:
    """Escape control characters, which could forge log lines or drive a terminal, and surrogates; cut long text."""
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


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
