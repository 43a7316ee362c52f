"""Old flags and environment variables of published cards, which target SGLang up to 0.5.18."""

import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

RENAMED = {
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
}
_GRAPHS = ("--cuda-graph-backend-prefill", "--cuda-graph-backend-decode")
_REMOVED, _TODAY = "tc_piecewise", "breakable"
_OVERLAP = "has no effect: overlap scheduling is the default, and --disable-overlap-schedule disables it"
_VARIABLES = {
    "SGLANG_ENABLE_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_DFLASH_SPEC_V2": _OVERLAP,
    "SGLANG_ENABLE_OVERLAP_PLAN_STREAM": "has no effect: only SGLang's own worker reads it",
    "SGLANG_SIMULATE_ACC_LEN": "simulates accept lengths: texts and speeds are meaningless",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "is not needed for the drafter; it still lifts the target's own limit",
}


def explain_environment(environ: Mapping[str, str] = os.environ) -> list[str]:
    return [f"{name}={environ[name]} {effect}" for name, effect in _VARIABLES.items() if name in environ]


def accept_old_flags(_: None, parser: ArgumentParser) -> None:
    """Hook after ``ServerArgs.add_cli_args``: ``parser`` accepts old flags, also from a ``--config`` file."""
    parse = parser.parse_known_args

    def parse_modern(args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        argv, notes = modernise_argv(sys.argv[1:] if args is None else args)
        for line in notes:
            logger.warning("DFLASH: %s", line)
        return parse(argv, namespace)

    parser.parse_known_args = parse_modern  # type: ignore[assignment, method-assign]


def modernise_argv(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    modern, notes, previous = list[str](), list[str](), ""
    for word in argv:
        flag, joined, value = word.partition("=")
        today = RENAMED.get(flag, flag) + joined + value
        if (word == _REMOVED and previous in _GRAPHS) or (flag in _GRAPHS and value == _REMOVED):
            today = word.replace(_REMOVED, _TODAY)
        if today != word:
            notes.append(f"{word} is now {today}")
        modern.append(today)
        previous = word
    return modern, notes
