"""Old flags and environment variables of published cards, which servers still accept.

Cards and z-lab's README were written for SGLang up to 0.5.18. Their flags are rewritten before they are parsed, so that
a card's command line runs as printed.
"""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.errors import DFlashError

_ON = {"1", "true", "yes", "on", "y", "t"}
_OVERLAP = (
    "is not needed: overlap scheduling is the default",
    "has no effect: one worker serves with and without overlap; "
    "to schedule without overlap, add --disable-overlap-schedule",
)
_PLAN_STREAM = "has no effect: only SGLang's own worker reads it"
_LONGER_CONTEXT = "is not needed for the drafter's context; it still lifts the target's own limit"
# variable -> what it does if it is on, and if it is off
_VARIABLES = {
    "SGLANG_ENABLE_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_DFLASH_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": (_PLAN_STREAM, _PLAN_STREAM),
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": (_LONGER_CONTEXT, _LONGER_CONTEXT),
}


def explain_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    """One line for each variable of the cards that is set."""
    return [
        f"{name}={value} {on if value.strip().lower() in _ON else off}"
        for name, (on, off) in _VARIABLES.items()
        if (value := environ.get(name)) is not None
    ]


logger = logging.getLogger(__name__)


def accept_old_flags(_: None, parser: ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: ``parser`` reads old flags, from a ``--config`` file too."""
    parse = parser.parse_known_args

    def parse_modern(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        try:
            argv, notes = modernise_argv(sys.argv[1:] if args is None else args)
        except DFlashError as error:
            parser.error(str(error))
        _log(notes)
        return parse(argv, namespace)

    parser.parse_known_args = parse_modern  # type: ignore[assignment, method-assign]


def accept_old_keywords(engine_class: Any) -> None:
    """Make ``Engine(...)`` take old keyword arguments too.

    The class attribute ``server_args_class`` is exchanged, as no hook can be put on a msgspec structure's
    constructor.
    """
    server_args_class = engine_class.server_args_class
    engine_class.server_args_class = staticmethod(lambda **kwargs: server_args_class(**modern_keywords(kwargs)))


def modern_keywords(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return today's keywords for ``Engine(...)``, and log each old one."""
    modern, notes = modernise_kwargs(kwargs)
    _log(notes)
    return modern


def _log(notes: Sequence[str]) -> None:
    for note in notes:
        logger.warning("DFLASH: %s", note)


RENAMED = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
}
# (flag, removed value) -> today's value with the same effect.
REPLACED_VALUES = {("--cuda-graph-backend-prefill", "tc_piecewise"): "breakable"}

_TOUCHED = {*RENAMED, *RENAMED.values(), *(flag for flag, _ in REPLACED_VALUES)}


def modernise_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return a server's command line in today's flags, and one line per change.

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
            pairs.append(("", token))  # another flag, or one without its value, which argparse reports
    modern, notes = _translate(pairs)
    return [word for option, value in modern for word in ((option, value) if option else (value,))], notes


def modernise_kwargs(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keyword arguments of ``Engine(...)`` as :func:`modernise_argv` returns a command line."""
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
