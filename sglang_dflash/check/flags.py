"""The server flags of a command line, read by SGLang's own parser."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from functools import cache
from typing import NoReturn

from sglang_dflash.check.memory import highest_fraction
from sglang_dflash.errors import DFlashError, Finding, error, first_true, note, warn
from sglang_dflash.launch.asked import OUR_BACKEND, Launch
from sglang_dflash.launch.division import size
from sglang_dflash.launch.published import AUTO, drafter_of
from sglang_dflash.launch.settings import READ, Settings, flag_of
from sglang_dflash.launch.states import flashinfer_states
from sglang_dflash.upstream import TESTED_SGLANG, check_version

CPU_BACKEND = "torch_dflash"  # registered with SGLang by our CPU platform
_MISSPELT = 0.9  # similarity of a misspelt flag; less proves nothing
_ADAPTIVE, _FORKS_WIDTH = "--speculative-adaptive", "speculative-dflash-dynamic-vbs"  # the second is a fork's
_LEAST_LEFT = 1 / 3  # of SGLang's estimate: published launches leave 0.4 of it or more
_COUNTED_IN_PART = {"enable_lora", "enable_mixed_chunk", "enable_hierarchical_cache"}  # read for other reasons


class _Parser(ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DFlashError(message, remedy="correct the flag or leave it out; `sglang serve --help` lists all flags")


@cache
def sglang_parser() -> ArgumentParser:
    """Return SGLang's parser with our CPU platform's attention backend; DFlashError for an untested SGLang."""
    check_version()
    from sglang_dflash.upstream.launch import DRAFT_ATTENTION_BACKEND_CHOICES, ServerArgs

    parser = _Parser(prog="sglang-dflash check", add_help=False)
    ServerArgs.add_cli_args(parser)
    for action in parser._actions:
        if action.dest == "speculative_draft_attention_backend":  # SGLang checks it later
            action.choices = sorted({*DRAFT_ATTENTION_BACKEND_CHOICES, OUR_BACKEND, CPU_BACKEND})
        elif action.choices and "attention_backend" in action.dest:
            action.choices = [*action.choices, CPU_BACKEND]
    return parser


def pair_arguments(target: str, drafter: str | None) -> dict[str, str]:
    pair = {"model_path": target, "speculative_algorithm": "DFLASH", "speculative_draft_model_path": drafter}
    return {name: value for name, value in pair.items() if value is not None}


def parse(flags: Sequence[str], *, target: str, drafter: str | None) -> tuple[Settings, list[str]]:
    """Return the settings, and the given flags that are not read or only in part.

    Raises:
        DFlashError: an invalid flag, value or word, another pair or algorithm, or ``auto`` without a published drafter.
    """
    pair = pair_arguments(target, drafter)
    own = [f"{flag_of(name)}={value}" for name, value in pair.items()]
    parser = sglang_parser()
    args, unknown = parser.parse_known_args([*own, *flags])
    if unknown:
        _refuse_unknown(unknown[0], [*parser._option_string_actions])
    for name, value in vars(args).items():
        if value == [] and parser.get_default(name) != []:  # argparse's reading of "--flag=--"
            parser.error(f"{flag_of(name)}: expected one argument")
    for name, value in pair.items():
        given, flag = getattr(args, name), flag_of(name)
        if given != value and (given.upper() != value or value != "DFLASH"):
            contradicts = f"{flag} {given} contradicts {value}, the pair that is checked"
            raise DFlashError(contradicts, remedy=f"leave {flag} out")
    if args.speculative_draft_model_path == AUTO:
        args.speculative_draft_model_path = drafter_of(target)
    read = READ - _COUNTED_IN_PART | pair.keys()
    changed = [name for name, value in vars(args).items() if value != parser.get_default(name)]
    return Settings(args), [flag_of(name) for name in changed if name not in read]


def check_unread(unread: Sequence[str]) -> Iterator[Finding]:
    if unread:
        yield note(
            f"{' '.join(unread)} (some flags change memory, kernels or parallelism)",
            remedy="read the memory that the server logs at its start",
            about="flags not counted",
        )


def _refuse_unknown(word: str, known: list[str]) -> None:
    if not word.startswith("-"):
        raise DFlashError(f"the word {word!r} belongs to no flag", remedy="leave it out, or put its flag before it")
    name = word.partition("=")[0]
    matches = [_ADAPTIVE] if name.endswith(_FORKS_WIDTH) else get_close_matches(name, known, 1, _MISSPELT)
    similar = next(iter(matches), None)
    raise DFlashError(
        f"SGLang {TESTED_SGLANG} has no flag {name}",
        remedy=f"set {similar}, or leave the flag out" if similar else "leave the flag out",
    )


def check_linear_backends(launch: Launch, cuda: str | None) -> Iterator[Finding]:
    """Yield what SGLang would refuse of FlashInfer's linear attention on Blackwell. ``cuda`` is torch's."""
    settings, device = launch.settings, launch.device
    flag, dtype = flashinfer_states(launch), settings.mamba_ssm_dtype
    if flag is not None and dtype != "bfloat16":
        level, given = (note, "") if dtype is None else (error, f", and --mamba-ssm-dtype is {dtype}")
        yield level(
            f"{flag} flashinfer on {device.name} needs recurrent states in bfloat16{given}",
            remedy=f"set --mamba-ssm-dtype bfloat16, or {flag} triton" if given else "none needed: the server sets it",
            about="recurrent state's dtype",
        )
    prefill = settings.linear_attn_prefill_backend or settings.linear_attn_backend
    served = cuda if device.is_local else None  # another machine may have another torch
    if device.is_blackwell and prefill == "flashinfer" and (served is None or int(served.partition(".")[0]) < 13):
        level, has = (warn, "the server's torch is unknown") if served is None else (error, f"torch has CUDA {served}")
        yield level(
            f"FlashInfer's linear prefill on this GPU needs CUDA 13, and {has}",
            remedy="install such a torch, or set --linear-attn-prefill-backend triton",
            about="torch's CUDA",
        )


# stored quantisation -> other valid --quantization (SGLang's ``ModelConfig._verify_quantization``)
_READ_AS = {
    "modelopt": {"modelopt_fp4", "modelopt_fp8", "modelopt_mixed", "petit_nvfp4"},
    "fp8": {"modelopt_fp4", "nvfp4_online"},
    "compressed-tensors": {"w8a8_int8", "w8a8_fp8", "auto-round-int8"},
    "awq": {"awq_marlin", "moe_wna16"},
    "gptq": {"gptq_marlin", "moe_wna16"},
    "mxfp8": {"minimax_m3_nvfp4"},
}
_REQUANTISES = {"quark_mxfp4"}


def check_refused(launch: Launch) -> Iterator[Finding]:
    """Yield what SGLang itself refuses at a start."""
    settings = launch.settings
    tokens, block = settings.speculative_num_draft_tokens, settings.speculative_dflash_block_size
    window = settings.speculative_draft_window_size
    sizes = f"--speculative-num-draft-tokens {tokens} and --speculative-dflash-block-size {block} differ"
    refused = {
        sizes: None not in (tokens, block) and tokens != block,
        f"--speculative-draft-window-size {window} is less than the block size {launch.block}": (window or launch.block)
        < launch.block,
        f"--pp-size {settings.pp_size}: DFLASH has no pipeline stages": settings.pp_size > 1,
    }
    if found := first_true(refused):
        yield error(found, remedy="change what is named", about="refused by SGLang")


def check_flags(launch: Launch) -> Iterator[Finding]:
    settings, device, stored = launch.settings, launch.device, launch.quantisation_method
    flag = (settings.quantization or "").replace("_tensors", "-tensors")
    if device.kind == "cpu" and (scheme := flag or stored):
        yield error(
            f"the target is quantised with {scheme}, and no CPU serves that",
            remedy="name the GPU to check (--gpu), or serve the unquantised target here",
            about="quantisation",
        )
    elif flag and stored and flag not in {stored, *_READ_AS.get(stored, ()), *_REQUANTISES}:
        yield error(
            f"--quantization {flag}, and the target is quantised with {stored}",
            remedy="leave --quantization out",
            about="quantisation",
        )
    if settings.enable_torch_compile and launch.kind is None and launch.drafter.selector_top_k:
        yield warn(
            "--enable-torch-compile with a DFlash2 drafter: users report that the capture of CUDA graphs fails",
            remedy="leave --enable-torch-compile out",
            about="torch.compile",
        )
    fraction = settings.mem_fraction_static or 0
    highest = highest_fraction(launch)
    least = (1 - highest) * (1 if device.is_unified else _LEAST_LEFT)
    if device.memory and 1 - fraction < least:
        kind = "unified memory, which the host's programs share" if device.is_unified else "device memory"
        left = size(int(device.memory * (1 - fraction))) or "nothing"
        yield warn(
            f"--mem-fraction-static {fraction} of {kind}: {left} remains for graphs and activations",
            remedy=f"set --mem-fraction-static {highest}",
            about="memory fraction",
        )
