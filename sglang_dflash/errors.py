"""The one error of this package, and the findings of its checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

Level = Literal["ok", "note", "warn", "error", "builtin"]
MAX_CHARACTERS = 4000  # characters; a part may quote a whole file


class DFlashError(ValueError):
    """A pair, flag, version or environment that cannot be served.

    Args:
        problem: what is wrong, in the user's terms (``"block_size is 64, and the target's context is 32 tokens"``).
        remedy: the next thing to do, as an instruction.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = printable(problem), remedy
        super().__init__(self.problem, remedy)

    def __str__(self) -> str:
        return f"sglang-dflash: {self.problem}. Fix: {self.remedy}."


def printable(text: str) -> str:
    """Cut long text, and escape control characters, which could forge log lines, and surrogates."""
    if len(text) > MAX_CHARACTERS:
        text = f"{text[:MAX_CHARACTERS]}..."
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


@dataclass(frozen=True)
class Finding:
    """One checked fact.

    Args:
        value: the fact, or what is wrong.
        remedy: as in :class:`DFlashError`.
        about: the heading under which ``check`` prints it.
    """

    level: Level
    value: str
    remedy: str = ""
    about: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", printable(self.value))  # may quote a file

    def __str__(self) -> str:
        return f"{self.about}: {self.value}. Fix: {self.remedy}."

    @classmethod
    def of(cls, error: DFlashError, about: str = "") -> Finding:
        return cls("error", error.problem, error.remedy, about)


ok = partial(Finding, "ok")
note = partial(Finding, "note")  # does not change the exit status of ``check``
warn = partial(Finding, "warn")  # about a pair or flag that is served
error = partial(Finding, "error")
builtin = partial(Finding, "builtin")  # why SGLang's own worker serves


def first_true(reasons: Mapping[str, object]) -> str | None:
    """Return the first reason that applies, or None."""
    return next((reason for reason, applies in reasons.items() if applies), None)
