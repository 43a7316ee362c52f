"""The server flags of a command line, read without SGLang's parser, which takes seconds to import.

``make drift`` writes ``sglang_flags.json`` from SGLang's parser.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import Field, dataclass, field
from decimal import Decimal
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from sglang_dflash.errors import DFlashError, Finding
from sglang_dflash.plan.settings import Settings, argument_fields, flag_of
from sglang_dflash.upstream import TESTED_SGLANG

LIST = Path(__file__).with_name("sglang_flags.json")


@dataclass(frozen=True)
class Flag:
    """A flag of SGLang."""

    names: list[str]  # spellings, the usual one first
    group: str = ""  # SGLang's configuration namespace of its field, such as "exec.moe"
    values: int | str = 1  # words that follow it, as argparse's nargs
    type: str = "str"  # or "int", "float", "count" (a number that may have a suffix: 32k)
    choices: list[str | int] = field(default_factory=list)  # empty if SGLang's parser accepts any


@cache
def known_flags() -> tuple[Flag, ...]:
    return tuple(Flag(**each) for each in json.loads(LIST.read_text(encoding="utf-8")))


# These configure the HTTP server, logs, metrics and host processes.
_HARMLESS_GROUPS = {"device", "observability", "serving"}
HARMFUL = {"--base-gpu-id", "--forward-hooks", "--kv-canary", "--kv-canary-real-data", "--use-ray"}
# Of the other groups: weight loading, kernel choices, scheduling order, transports and image preprocessing.
HARMLESS = (
    *("--checkpoint-engine-", "--download-dir", "--engine-info-bootstrap-port", "--load-format", "--model-checksum"),
    *("--model-loader-extra-config", "--modelexpress-config", "--remote-instance-", "--startup-weight-load-mode"),
    *("--speculative-draft-load-format", "--weight-cache-", "--weight-loader-"),
    *("--bf16-gemm-backend", "--cuda-graph-backend-prefill", "--disable-custom-all-reduce", "--flashinfer-a"),
    *("--disable-flashinfer-autotune", "--enable-flashinfer-allreduce-fusion", "--fp4-gemm-backend"),
    *("--enforce-disable-flashinfer-allreduce-fusion", "--fp8-gemm-backend", "--moe-runner-backend"),
    *("--disable-outlines-disk-cache", "--enable-custom-logit-processor", "--grammar-backend", "--sampling-backend"),
    *("--abort-on-priority-when-disabled", "--default-priority-value", "--disable-priority-preemption"),
    *("--enable-prefill-delayer", "--enable-priority-scheduling", "--max-queued-requests", "--min-free-slots-delay"),
    *("--prefill-decode-interval", "--prefill-delayer-", "--prefill-max-requests", "--priority-scheduling-"),
    *("--radix-eviction-policy", "--retraction-policy", "--schedule-", "--scheduler-recv-interval"),
    *("--dist-", "--enable-p2p-check", "--load-balance-method", "--nccl-port", "--nnodes", "--node-rank"),
    *("--disaggregation-bootstrap-port", "--disaggregation-decode-polling-interval", "--disaggregation-ib-device"),
    *("--disaggregation-enable-kv-checksum", "--disaggregation-transfer-backend", "--optimistic-prefill-attempts"),
    *("--allowed-media-domains", "--image-processor-backend", "--limit-mm-data-per-request", "--media-url-max"),
    *("--mm-io-", "--mm-preprocess-", "--mm-process", "--trust-mm-content-hashes"),
)


def check_unread(unread: Iterable[str]) -> Iterator[Finding]:
    """Yield findings on flags that the preflight does not read: warnings, unless they cannot change its result."""
    given = set(unread)
    known = [flag for flag in known_flags() if flag.names[0] in given]
    harmless = [flag.names[0] for flag in known if _is_harmless(flag)]
    if harmless:
        yield Finding("ok", "flags ignored", " ".join(harmless))
    if others := [flag.names[0] for flag in known if flag.names[0] not in harmless]:
        yield Finding(
            "warn",
            "flags not counted",
            f"{' '.join(others)}: they may change memory, kernels or parallelism",
            expected="flags that this check reads",
            remedy="read the memory that the server logs at its start, and lower --mem-fraction-static if it runs out",
        )


def _is_harmless(flag: Flag) -> bool:
    name = flag.names[0]
    return name not in HARMFUL and (flag.group in _HARMLESS_GROUPS or name.startswith(HARMLESS))


def count(text: str) -> int:
    """Parse a number of tokens (``32768``, ``32k``, ``25.6k``, ``32Ki``); anything else is a ValueError."""
    found = re.fullmatch(r"(\d{1,30}(?:\.\d{1,30})?)(k|M|G|T|Ki|Mi|Gi|Ti)", text.strip())
    if found is None:
        return int(text)
    number, unit = found.groups()
    exponent = "kmgt".index(unit[0].lower()) + 1
    return int(number) * 1024**exponent if unit.endswith("i") else int(Decimal(number) * 1000**exponent)


CPU_BACKEND = "torch_dflash"  # attention backend of our CPU platform, which registers it with SGLang
# Given by the preflight's own arguments; accepted so that a card's command line can be pasted after them.
_GIVEN = ("--model-path", "--speculative-algorithm", "--speculative-draft-model-path")
_TYPES: dict[str, Callable[[str], object]] = {"int": int, "float": float, "count": count, "str": str}


def read_fields() -> dict[str, Field[Any]]:
    """The settings that a command line sets, by flag."""
    return {flag: each for each in argument_fields() if (flag := flag_of(each.name)) not in _GIVEN}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DFlashError(
            message,
            expected=f"flags as SGLang {TESTED_SGLANG} takes them",
            remedy="correct the flag or leave it out; `sglang serve --help` lists all flags",
        )


class _Unread(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.unread.append(self.option_strings[0])


class _InPart(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, True)
        namespace.unread.append(self.option_strings[0])


def parse(flags: Sequence[str], *, target: str, drafter: str) -> tuple[Settings, list[str]]:
    """Return the settings, and the flags that were not read.

    Raises:
        DFlashError: SGLang has no such flag or does not accept its value; a word belongs to no flag; the flags name
            another pair or algorithm.
    """
    args, unknown = _parser().parse_known_args(flags, argparse.Namespace(unread=[]))
    if unknown:
        _refuse_unknown(unknown[0])
    for name, value in vars(args).items():
        if value == [] and name != "unread":  # argparse's reading of "--flag=--"
            _parser().error(f"{flag_of(name)}: expected one argument")
    pair = {"model_path": target, "speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
    for name, value in pair.items():
        for given in getattr(args, name) or ():
            _refuse_another(flag_of(name), given, value)
        setattr(args, name, value)
    return Settings.of(args), args.unread


@cache
def _parser() -> _Parser:
    parser, read = _Parser(prog="sglang-dflash check", add_help=False), read_fields()
    for flag in known_flags():
        name = flag.names[0]
        options: dict[str, Any] = {"choices": flag.choices} if flag.choices else {}
        if "attention-backend" in name and flag.choices:
            options["choices"] = [*flag.choices, CPU_BACKEND]
        if name in _GIVEN:
            parser.add_argument(*flag.names, action="append")
        elif name not in read:
            kind, values = _TYPES[flag.type], None if flag.values == 1 else flag.values
            parser.add_argument(
                *flag.names, action=_Unread, type=kind, nargs=values, default=argparse.SUPPRESS, **options
            )
        elif str(read[name].type).startswith("bool"):
            in_part = "in_part" in read[name].metadata
            options = {"action": _InPart, "nargs": 0} if in_part else {"action": "store_true"}
            parser.add_argument(*flag.names, default=read[name].default, **options)
        else:
            setting = read[name]
            kind = count if setting.metadata.get("suffixed") else _TYPES[str(setting.type).split()[0]]
            parser.add_argument(*flag.names, type=kind, default=setting.default, **options)
    return parser


def _refuse_unknown(word: str) -> None:
    if not word.startswith("-"):
        raise DFlashError(
            f"the word {word!r} belongs to no flag",
            expected="flags of `sglang serve` with their values after the two models",
            remedy="leave it out, or put its flag before it",
        )
    name, known = word.partition("=")[0], [name for flag in known_flags() for name in flag.names]
    similar = next(iter(get_close_matches(name, known, 1)), None)
    raise DFlashError(
        f"SGLang {TESTED_SGLANG} has no flag {name}",
        expected=f"a flag of `sglang serve`{f', such as {similar}' if similar else ''}",
        remedy=f"set {similar}, or leave the flag out" if similar else "leave the flag out",
    )


def _refuse_another(flag: str, given: str, value: str) -> None:
    if given != value and (given.upper() != value or value != "DFLASH"):
        raise DFlashError(
            f"{flag} {given} contradicts {value}, the pair that is checked",
            expected=f"{flag} {value}",
            remedy=f"leave {flag} out",
        )
