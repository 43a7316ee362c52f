"""Command lines, keyword arguments, the adaptive width's file, environment variables and what the driver says."""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st

from sglang_dflash.check.backends import check_backends
from sglang_dflash.check.old_flags import RENAMED, REPLACED_VALUES, modernise_argv, modernise_kwargs
from sglang_dflash.check.options import ALIASES, SWITCHES, VALUED, parse
from sglang_dflash.check.preflight import preflight
from sglang_dflash.check.replay import asked_for, length
from sglang_dflash.cpu.activation import reason_to_stay_out, unused_devices
from sglang_dflash.cpu.arguments.threads import BIND_VARIABLE, environment_defaults, parse_cores, threads_of_a_rank
from sglang_dflash.hooks.environment import explain_environment
from sglang_dflash.hooks.flags import accept_old_flags
from sglang_dflash.memory.machine import CPU, GPUS, asked_about
from sglang_dflash.memory.machine import parse as parse_driver
from sglang_dflash.width import build_policy, read_config
from tests.fuzz.checkpoints import may_refuse
from tests.fuzz.drafters import show, text
from tests.fuzz.part import Part
from tests.fuzz.values import FLOATS, INTEGERS, damage, dumped, pick, spoil
from tests.support.broken_pairs import Broken, write_pair
from tests.support.configs import target

_OLD = [*RENAMED, *RENAMED.values(), *(flag for flag, _ in REPLACED_VALUES)]
_FLAGS = [*VALUED, *SWITCHES, *RENAMED, *(alias for each in ALIASES.values() for alias in each), "--model-path", "--"]
_WORDS = [
    *(
        "",
        "0",
        "-1",
        "1",
        "2",
        "4",
        "8",
        "16",
        "64",
        "1e9",
        "0.5",
        "nan",
        "inf",
        "9" * 30,
        "9" * 5000,
        "--",
        "=",
        "null",
    ),
    *("auto", "tc_piecewise", "breakable", "extra_buffer", "no_buffer", "fa3", "trtllm_mha", "float16", "fp8_e4m3"),
    *("{}", "[]", '{"num_hidden_layers": 1e9}', '{"hidden_size": "x"}', "[" * 5000, '{"a": NaN}', "../../etc/passwd"),
    *("builtin", "on", "float32", "bf16", "0-3,5", "0-99999999999", "4,2"),
]
# What a shell can hand over: no NUL.
_DRAWN = st.text(max_size=12).map(lambda word: word.replace("\x00", "")) | st.integers().map(str) | st.floats().map(str)
_WIDTHS: list[dict[str, Any]] = [
    {"policy": "random", "widths": [1, 4, 16], "seed": 7},
    {"policy": "adaptive"},
    {"policy": "fixed", "widths": [4]},
    {"8": {"candidate_steps": [1, 3]}},  # SGLang's own form
]
_VARIABLES = (
    "SGLANG_DFLASH", "SGLANG_DFLASH_STATE_REPLAY", "SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE",
    "SGLANG_ENABLE_SPEC_V2", "SGLANG_ENABLE_DFLASH_SPEC_V2", "SGLANG_ENABLE_OVERLAP_PLAN_STREAM",
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE", "CUDA_VISIBLE_DEVICES",
    BIND_VARIABLE, "OMP_NUM_THREADS",
)  # fmt: skip
_GDN = {
    "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
_NUMBERS = {
    flag.removeprefix("--").replace("-", "_"): INTEGERS if kind is int else FLOATS
    for flag, (kind, _) in VALUED.items()
    if kind is not str
}


def word(random: Random, values: list[str]) -> str:
    return random.choice(values if random.random() < 0.3 else _WORDS)


def argv(random: Random, values: list[str], flags: list[str] = _FLAGS) -> list[str]:
    words = []
    for _ in range(random.randint(1, 5)):
        flag, value = random.choice(flags), word(random, values)
        words += random.choice(([flag, value], [flag, value], [f"{flag}={value}"], [flag], [value]))
    return words


def keywords(random: Random, values: list[Any]) -> dict[str, Any]:
    names = [*(flag.removeprefix("--").replace("-", "_") for flag in _OLD), "tp_size", "a-b", "--x", ""]
    return {random.choice([*names, str(random.choice(values))]): pick(random, values) for _ in range(4)}


def numbers(random: Random, values: list[Any]) -> dict[str, Any]:
    names = random.sample(sorted(_NUMBERS), random.randint(1, 3))
    drawn = [value for value in values if isinstance(value, int | float)]
    return {name: random.choice([None, *_NUMBERS[name], *drawn]) for name in names}


def widths(random: Random, values: list[Any]) -> tuple[bytes, int]:
    keys = ["policy", "widths", "seed", "16"]
    content = dumped(spoil(random, random.choice(_WIDTHS), keys, values))
    kind = random.random()
    content = text(random, values) if kind < 0.2 else damage(random, content) if kind < 0.3 else content
    return content, random.choice((1, 2, 10, 16))


def environment(random: Random, values: list[str]) -> dict[str, str]:
    said = {random.choice(_VARIABLES): word(random, values) for _ in range(random.randint(1, 3))}
    return {name: value for name, value in said.items() if _can_be_set(value)}


def answer(random: Random, values: list[str]) -> str:
    whole = random.choice((b"NVIDIA H100, 81559, 9.0", b"NVIDIA GB10, [N/A], 12.1", b"a, b, 143771, 9.0\n"))
    return random.choice((damage(random, whole).decode("latin-1"), ", ".join(word(random, values) for _ in range(3))))


def parts(folder: Path) -> list[Part]:
    write_pair(folder, Broken("", ""))
    own, its_target, hybrid = str(folder / "drafter"), str(folder / "target"), folder / "hybrid"
    hybrid.mkdir()
    (hybrid / "config.json").write_text(json.dumps(target(**_GDN)))
    file, builtin_requested = folder / "width.json", _switch()
    defaults, _, _ = parse(["--dtype", "bfloat16"], target=str(hybrid), drafter=own)

    def translate(words: list[str]) -> None:
        modernise_argv(words)
        parser = ArgumentParser()
        for flag in set(RENAMED.values()) | {"--cuda-graph-backend-prefill"}:
            parser.add_argument(flag)
        accept_old_flags(None, parser)
        parser.parse_known_args(words)

    def check(words: list[str]) -> None:
        for path, machine in ((its_target, CPU), (str(hybrid), GPUS["h100"])):
            args, _, _ = parse(words, target=path, drafter=own)
            show(preflight(args, machine))

    def resolve(changes: dict[str, Any]) -> None:
        args = SimpleNamespace(**{**vars(defaults), **changes})
        list(check_backends(args, GPUS["b200"], hybrid=True))
        report = preflight(args, asked_about("cuda", 80.0))
        show(report)
        if report.findings[0].level == "ok":
            length(args, 16)

    def read_widths(value: tuple[bytes, int]) -> None:
        assert 1 <= build_policy(read_config(str(file)), value[1]).width(3) <= value[1]

    def say(environ: dict[str, str]) -> None:
        with patch.dict(os.environ, environ):
            explain_environment(environ)
            unused_devices(environ)
            reason_to_stay_out(environ, usable=[], unused=[], others=[])
            environment_defaults(2, "float32")
            groups = environ.get(BIND_VARIABLE, "").split("|")
            for call in (builtin_requested, lambda: asked_for(defaults), lambda: threads_of_a_rank(environ)):
                may_refuse(call)
            may_refuse(lambda: [parse_cores(group) for group in groups])
            show(preflight(defaults, GPUS["b200"]))

    return [
        Part("old flags", lambda r, v: argv(r, v, [*_OLD, *_OLD, *_FLAGS]), translate, 14_000, values=_DRAWN),
        Part("old keywords", keywords, modernise_kwargs, 10_000),
        Part("server flags, whole check", argv, check, 4_000, folder=folder, values=_DRAWN),
        Part("argument values, whole check", numbers, resolve, 4_000, folder=folder),
        Part("adaptive width's file", widths, read_widths, 7_000, lambda value: file.write_bytes(value[0]), folder),
        Part("environment", environment, say, 2_000, folder=folder, values=_DRAWN),
        Part("nvidia-smi's answer", answer, parse_driver, 4_000, values=_DRAWN),
    ]


def _switch() -> Callable[[], object]:
    """The reading of ``SGLANG_DFLASH``, whose module needs SGLang."""
    if find_spec("sglang") is None:
        return lambda: None
    from sglang_dflash.hooks.takeover import builtin_requested

    return builtin_requested


def _can_be_set(value: str) -> bool:
    try:
        os.fsencode(value)
    except UnicodeEncodeError:
        return False
    return "\x00" not in value
