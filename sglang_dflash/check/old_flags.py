"""The published cards' flags, translated into today's.

Drafter cards and z-lab's README were written for SGLang up to 0.5.18. Their flags are rewritten before SGLang
parses them, so that a card's command line runs as printed; each rewrite is one log line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.errors import DFlashError

RENAMED = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
}
# (flag, removed value) -> the value that does today what the removed one did.
REPLACED_VALUES = {("--cuda-graph-backend-prefill", "tc_piecewise"): "breakable"}

_TOUCHED = {*RENAMED, *RENAMED.values(), *(flag for flag, _ in REPLACED_VALUES)}


def modernise_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Rewrite a server's command line.

    Returns:
        The command line in today's flags, and one line for each thing that changed.

    Raises:
        DFlashError: an old flag and its new name are both given, with different values.
    """
    translation, modern = _Translation(), []
    tokens = iter(argv)
    for token in tokens:
        option, joined, value = token.partition("=")
        if option not in _TOUCHED:
            modern.append(token)
        elif joined or (value := next(tokens, "")):
            modern += translation.add(option, value)
        else:
            modern.append(token)  # a flag without its value: argparse says so
    translation.refuse_contradictions()
    return modern, translation.notes


def modernise_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Rewrite the keyword arguments of ``Engine(...)``; returns and raises as :func:`modernise_argv`."""
    translation, modern = _Translation(), {}
    for key, value in kwargs.items():
        option = "--" + key.replace("_", "-")
        if option in _TOUCHED:
            name, value = translation.add(option, value)
            key = name.removeprefix("--").replace("-", "_")
        modern[key] = value
    translation.refuse_contradictions()
    return modern, translation.notes


class _Translation:
    """Translates the touched options of one command line and remembers what each name was given."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self._given: dict[str, dict[str, Any]] = {}

    def add(self, option: str, value: Any) -> tuple[str, Any]:
        name = RENAMED.get(option, option)
        modern = REPLACED_VALUES.get((name, value), value)
        if (name, modern) != (option, value):
            self.notes.append(f"{option} {value} is now {name} {modern}")
        self._given.setdefault(name, {})[option] = modern
        return name, modern

    def refuse_contradictions(self) -> None:
        for name, by_option in self._given.items():
            if len({str(value) for value in by_option.values()}) > 1:
                raise DFlashError(
                    " and ".join(f"{option} {value}" for option, value in by_option.items()),
                    expected=f"one value: both mean {name}",
                    remedy=f"keep only {name}",
                )
