"""The published cards' old flags and environment variables, which servers still accept."""

from __future__ import annotations

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.flags import modernise_argv, modernise_kwargs

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
    """Today's keywords for ``Engine(...)``; each old one is one log line."""
    modern, notes = modernise_kwargs(kwargs)
    _log(notes)
    return modern


def _log(notes: Sequence[str]) -> None:
    for note in notes:
        logger.warning("DFLASH: %s", note)
