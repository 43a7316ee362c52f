"""The server flags of a command line, read by SGLang's own parser."""

import os
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from json import JSONDecodeError
from typing import NoReturn

from sglang_dflash.errors import DFlashError, Finding, note
from sglang_dflash.launch.launch import OUR_BACKEND
from sglang_dflash.launch.published import AUTO, drafter_of
from sglang_dflash.launch.settings import Settings, flag_of
from sglang_dflash.upstream import TESTED_SGLANG, check_version

CPU_BACKEND = "torch_dflash"  # registered with SGLang by our CPU platform
_MISSPELT = 0.9  # similarity of a misspelt flag; less proves nothing
_ADAPTIVE, _FORKS_WIDTH = "--speculative-adaptive", "speculative-dflash-dynamic-vbs"  # the second is a fork's
_COUNTED_IN_PART = {"enable_lora", "enable_mixed_chunk", "enable_hierarchical_cache"}  # read for other reasons
# neither memory nor kernels, in addition to SGLang's groups `Serving` and `Observability`
_SILENT = {"download_dir", "load_format", "max_queued_requests", "random_seed", "schedule_policy", "sleep_on_idle"}
_SILENT |= {"speculative_algorithm", "speculative_draft_load_format", "trust_remote_code", "watchdog_timeout"}
# SGLang sets the first two for DFLASH; each committed token is the target's own draw
_WITHOUT_EFFECT = {"speculative_num_steps", "speculative_eagle_topk"}
_WITHOUT_EFFECT |= {"speculative_use_rejection_sampling", "speculative_use_block_verification"}


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DFlashError(message, remedy="correct the flag or leave it out; `sglang serve --help` lists all flags")


@cache
def sglang_parser() -> ArgumentParser:
    """Return SGLang's parser with our CPU platform's attention backend; DFlashError for an untested SGLang."""
    check_version()
    from sglang_dflash.upstream.names import DRAFT_ATTENTION_BACKEND_CHOICES, ServerArgs

    parser = _Parser(prog="sglang-dflash check", add_help=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        if action.dest == "speculative_draft_attention_backend":  # SGLang checks it later
            action.choices = sorted({*DRAFT_ATTENTION_BACKEND_CHOICES, OUR_BACKEND, CPU_BACKEND})
        elif action.choices and "attention_backend" in action.dest:
            action.choices = [*action.choices, CPU_BACKEND]
    return parser


def merged(flags: Sequence[str]) -> list[str]:
    """Return the flags behind those of a ``--config`` file, as SGLang merges them; DFlashError for a bad file."""
    if "--config" not in flags:
        return list(flags)
    from sglang_dflash.upstream.names import ConfigArgumentMerger, yaml

    try:
        return [*ConfigArgumentMerger(sglang_parser()).merge_config_with_args(list(flags))]
    except (ValueError, OSError, yaml.YAMLError) as refused:
        raise DFlashError(f"--config: {refused}", remedy="name a YAML file of server flags") from None


def parse(flags: Sequence[str], *, target: str | None, drafter: str | None) -> tuple[Settings, list[str]]:
    """Return the settings, and the names of the arguments that differ from their defaults.

    Raises:
        DFlashError: an invalid flag, value or word, another pair or algorithm, no target, a folder that does not exist,
            or ``auto`` without a known drafter.
    """
    pair = {"model_path": target, "speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
    own = [f"{flag_of(name)}={value}" for name, value in pair.items() if value is not None]
    parser = sglang_parser()
    try:
        args, unknown = parser.parse_known_args([*own, *flags])
    except (AssertionError, JSONDecodeError) as refused:
        parser.error(f"--lora-paths: {refused}")
    if unknown:
        word, known = unknown[0].partition("=")[0], list(parser._option_string_actions)
        near = [_ADAPTIVE] if word.endswith(_FORKS_WIDTH) else get_close_matches(word, known, 1, _MISSPELT)
        if not word.startswith("-"):
            raise DFlashError(f"the word {word!r} belongs to no flag", remedy="leave it out, or put its flag before it")
        remedy = ", or ".join([*(f"set {flag}" for flag in near), "leave the flag out"])
        raise DFlashError(f"SGLang {TESTED_SGLANG} has no flag {word}", remedy=remedy)
    for name, value in vars(args).items():
        if value == [] and parser.get_default(name) != []:  # argparse's reading of "--flag=--"
            parser.error(f"{flag_of(name)}: expected one argument")
    for name, value in pair.items():
        given, flag = getattr(args, name), flag_of(name)
        if value is not None and given != value and (given.upper() != value or value != "DFLASH"):
            raise DFlashError(f"{flag} {given} contradicts {value}, which is checked", remedy=f"leave {flag} out")
    for path in (args.model_path, args.speculative_draft_model_path or ""):
        if path.startswith(("/", "./", "../", "~")) and not os.path.isdir(path):
            raise DFlashError(f"there is no folder {path}", remedy="correct the path")
    if args.speculative_draft_model_path == AUTO:
        args.speculative_draft_model_path = drafter_of(args.model_path)
    changed = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    return Settings(args), [name for name in changed if name not in pair]


def check_unread(given: Sequence[str], settings: Settings) -> Iterator[Finding]:
    """Yield a note that names the given arguments that ``check`` has not read, if they can matter."""
    from sglang_dflash.upstream.names import Observability, Serving

    read = settings.read - _COUNTED_IN_PART | _SILENT | Serving.__annotations__.keys()
    read |= Observability.__annotations__.keys()
    unread = [name for name in given if name not in read]
    if none := [flag_of(name) for name in unread if name in _WITHOUT_EFFECT]:
        yield note(f"{' and '.join(none)} {'have' if len(none) > 1 else 'has'} no effect with DFLASH", about="flags")
    if counted := [flag_of(name) for name in unread if name not in _WITHOUT_EFFECT]:
        found = f"{' '.join(counted)}: flags that can change memory or kernels, which this check does not count"
        yield note(found, remedy="read the memory that the server logs at its start", about="flags not counted")
