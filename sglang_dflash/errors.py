"""The one error a user of this package sees: what was found, what was expected, what to do."""

from __future__ import annotations

LONGEST = 4000  # characters of each part of an error: what is wrong may be a whole file


class DFlashError(ValueError):
    """A pair, flag, version or environment that cannot be served.

    Args:
        value: what was found, named as the user knows it (``"block_size 64 (--speculative-num-draft-tokens)"``).
        expected: what would have been accepted.
        remedy: the next thing to do, as an instruction.
    """

    def __init__(self, value: str, *, expected: str, remedy: str) -> None:
        self.value, self.expected, self.remedy = printable(value), printable(expected), remedy
        super().__init__(f"sglang-dflash: {self.value}. Expected: {self.expected}. Remedy: {self.remedy}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the class and the three parts when the error crosses a process boundary."""
        return (_rebuild, (type(self), self.value, self.expected, self.remedy))


class Doubt(DFlashError):
    """A pair or flag that is warned of and served."""


def printable(text: str) -> str:
    """``text`` as a terminal and a log can show it, whatever a file put into it.

    Control characters, which could forge log lines or drive a terminal, are escaped, as are surrogates, which no stream
    encodes.
    """
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}..."
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _rebuild(kind: type[DFlashError], value: str, expected: str, remedy: str) -> DFlashError:
    return kind(value, expected=expected, remedy=remedy)
