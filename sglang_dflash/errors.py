"""The one error a user of this package sees: what was found, what was expected, what to do."""

from __future__ import annotations


class DFlashError(ValueError):
    """A pair, flag, version or environment that cannot be served.

    Args:
        value: what was found, named as the user knows it (``"block_size 64 (--speculative-num-draft-tokens)"``).
        expected: what would have been accepted.
        remedy: the next thing to do, as an instruction.
    """

    def __init__(self, value: str, *, expected: str, remedy: str) -> None:
        self.value, self.expected, self.remedy = value, expected, remedy
        super().__init__(f"sglang-dflash: {value}. Expected: {expected}. Remedy: {remedy}.")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the three parts when the error crosses a process boundary."""
        return (_rebuild, (self.value, self.expected, self.remedy))


def _rebuild(value: str, expected: str, remedy: str) -> DFlashError:
    return DFlashError(value, expected=expected, remedy=remedy)
