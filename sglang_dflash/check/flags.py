"""The server flags that the preflight reads, and the published cards' old ones in today's spelling.

Parsed here, not by SGLang, whose parser takes seconds to import. Flags that decide nothing the preflight looks at are
accepted and listed; the server's own parser judges them. Drafter cards and z-lab's README were written for SGLang up to
0.5.18: their flags are rewritten before SGLang parses them, so that a card's command line runs as printed.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_dflash.errors import DFlashError

# flag -> (type, default)
VALUED: dict[str, tuple[type, object]] = {
    "--attention-backend": (str, None),
    "--base-gpu-id": (int, 0),
    "--chat-template": (str, None),
    "--context-length": (int, None),
    "--cpu-offload-gb": (int, 0),
    "--cuda-graph-backend-decode": (str, None),
    "--cuda-graph-max-bs-decode": (int, None),
    "--decode-attention-backend": (str, None),
    "--device": (str, None),
    "--disaggregation-decode-extra-slots": (int, None),
    "--disaggregation-decode-retraction-backup": (str, None),
    "--disaggregation-mode": (str, "null"),
    "--dtype": (str, "auto"),
    "--json-model-override-args": (str, "{}"),
    "--kv-cache-dtype": (str, "auto"),
    "--linear-attn-backend": (str, "triton"),
    "--linear-attn-decode-backend": (str, None),
    "--linear-replayssm-cache-len": (int, 16),
    "--mamba-full-memory-ratio": (float, None),
    "--mamba-radix-cache-strategy": (str, "auto"),
    "--mamba-ssm-dtype": (str, None),
    "--mamba-track-interval": (int, 256),
    "--max-mamba-cache-size": (int, None),
    "--max-running-requests": (int, None),
    "--max-total-tokens": (int, None),
    "--mem-fraction-static": (float, None),
    "--offload-group-size": (int, -1),
    "--page-size": (int, None),
    "--pp-size": (int, 1),
    "--prefill-attention-backend": (str, None),
    "--quantization": (str, None),
    "--revision": (str, None),
    "--speculative-adaptive-config": (str, None),
    "--speculative-dflash-block-size": (int, None),
    "--speculative-draft-attention-backend": (str, None),
    "--speculative-draft-kv-cache-dtype": (str, None),
    "--speculative-draft-model-quantization": (str, None),
    "--speculative-draft-model-revision": (str, None),
    "--speculative-draft-window-size": (int, None),
    "--speculative-num-draft-tokens": (int, None),
    "--tp-size": (int, 1),
}
SWITCHES = (
    "--disable-decode-cuda-graph",
    "--disable-overlap-schedule",
    "--disable-radix-cache",
    "--enable-linear-replayssm",
    "--enable-linear-replayssm-spec",
    "--enable-pd-role-switch",
    "--enable-unified-memory",
    "--speculative-adaptive",
    "--trust-remote-code",
)
ALIASES = {"--tp-size": ["--tensor-parallel-size", "--tp"], "--pp-size": ["--pipeline-parallel-size"]}
# Given by the preflight's own arguments; accepted so that a card's command line can be pasted after them.
_GIVEN = ("--model-path", "--model", "--speculative-algorithm", "--speculative-draft-model-path")


def parse(flags: Sequence[str], *, target: str, drafter: str) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Parse a server's flags.

    Returns:
        The arguments by SGLang's names; one line for each old flag that was translated; the flags that were not read.

    Raises:
        DFlashError: an old flag and its new name contradict each other.
        SystemExit: a flag's value has the wrong type (argparse).
    """
    modern, notes = modernise_argv(flags)
    parser = argparse.ArgumentParser(prog="sglang-dflash check", add_help=False, allow_abbrev=False)
    for flag, (kind, default) in VALUED.items():
        parser.add_argument(flag, *ALIASES.get(flag, []), type=kind, default=default)
    for flag in SWITCHES:
        parser.add_argument(flag, action="store_true")
    for flag in _GIVEN:
        parser.add_argument(flag, dest="_given")
    args, unread = parser.parse_known_args(modern)
    for name, value in vars(args).items():
        if value == []:  # argparse's reading of "--flag=--"
            parser.error(f"--{name.replace('_', '-')}: expected one argument")
    args.model_path, args.speculative_draft_model_path, args.speculative_algorithm = target, drafter, "DFLASH"
    return args, notes, [word for word in unread if word.startswith("--")]


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
