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
    pairs: list[tuple[str, Any]] = []
    tokens = iter(argv)
    for token in tokens:
        option, joined, value = token.partition("=")
        if option in _TOUCHED and (joined or (value := next(tokens, ""))):
            pairs.append((option, value))
        else:
            pairs.append(("", token))  # not ours; or a flag without its value, which argparse reports
    modern, notes = _translate(pairs)
    return [word for option, value in modern for word in ((option, value) if option else (value,))], notes


def modernise_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Rewrite the keyword arguments of ``Engine(...)``; returns and raises as :func:`modernise_argv`."""
    flags = {key: "--" + key.replace("_", "-") for key in kwargs}
    ours = {key for key, flag in flags.items() if flag in _TOUCHED}
    modern, notes = _translate([(flags[key], kwargs[key]) for key in kwargs if key in ours])
    others = {key: value for key, value in kwargs.items() if key not in ours}
    return {**others, **{option.removeprefix("--").replace("-", "_"): value for option, value in modern}}, notes


def _translate(pairs: Sequence[tuple[str, Any]]) -> tuple[list[tuple[str, Any]], list[str]]:
    modern, notes = [], []
    given: dict[str, dict[str, Any]] = {}
    for option, value in pairs:
        name = RENAMED.get(option, option)
        pair = name, REPLACED_VALUES.get((name, value), value) if isinstance(value, str) else value
        if pair != (option, value):
            notes.append(f"{option} {value} is now {name} {pair[1]}")
        modern.append(pair)
        if name in _TOUCHED:
            given.setdefault(name, {})[option] = pair[1]
    for name, by_option in given.items():
        if len({str(value) for value in by_option.values()}) > 1:
            raise DFlashError(
                " and ".join(f"{option} {value}" for option, value in by_option.items()),
                expected=f"one value: both mean {name}",
                remedy=f"keep only {name}",
            )
    return modern, notes
