"""A mistake in flags, variables or the driver's answer ends in one error that names it."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_dflash.check import machine
from sglang_dflash.check.flags import check_unread, parse, sglang_parser
from sglang_dflash.check.report import preflight
from sglang_dflash.errors import Finding
from sglang_dflash.launch.old_flags import RENAMED, accept_old_flags, explain_environment, modernise_argv
from sglang_dflash.launch.published import published_pairs
from sglang_dflash.launch.settings import _LIMITS, DRAFTER_ARGUMENTS, flag_of
from sglang_dflash_cpu.threads import BIND_VARIABLE, parse_cores, threads_of_a_rank
from tests.fuzz.judge import judged
from tests.fuzz.test_model_files import FILES
from tests.fuzz.values import FLOATS, INTEGERS, fuzz
from tests.support.broken_pairs import Broken, write_pair
from tests.support.files import raise_first_error

READ = {*_LIMITS, *DRAFTER_ARGUMENTS, "attention_backend", "kv_cache_dtype", "dtype", "quantization", "dp_size"}
READ |= {"speculative_adaptive", "mamba_ssm_dtype", "mamba_radix_cache_strategy", "disaggregation_mode"}
READ |= {"json_model_override_args", "linear_attn_backend", "disable_radix_cache", "attn_dp_size", "page_size"}
FLAGS = [*RENAMED, *sglang_parser()._option_string_actions, "--tp", "--"]
FLAGS += [flag_of(name) for name in sorted(READ)] * 8  # about as often as flags that are not read
WORDS = ["--", "=", "auto", "extra_buffer", "fa3", "float16", "fp8_e4m3", "{}", "[]", "0-3,5", "0-99999999999", "4,2"]
WORDS += ["", "9" * 5000, "[" * 5000, '{"num_hidden_layers": 1e9}', '{"a": NaN}', *map(str, [*INTEGERS, *FLOATS])]
WORD = st.sampled_from(WORDS) | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
ARGV = st.lists(st.sampled_from(FLAGS) | st.builds("{}={}".format, st.sampled_from(FLAGS), WORD) | WORD, max_size=9)
VARIABLES = ["SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_ENABLE_SPEC_V2"]
VARIABLES += ["SGLANG_DFLASH", "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", BIND_VARIABLE, "OMP_NUM_THREADS"]
FOLDER_NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..", "target")
)
HYBRID = {"model_type": "qwen3_next", "full_attention_interval": 4, "linear_conv_kernel_dim": 4}
HYBRID |= {f"linear_{each}": 4 for each in ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")}


def check(folder: Path, *flags: str, code: bool = False, **target: Any) -> list[Finding]:
    """The whole check of a pair that is written at the first call."""
    if not folder.exists():
        auto_map = {"auto_map": {"AutoConfig": "configuration.Own"}} if code else {}
        write_pair(folder, Broken("", "", drafter=auto_map, target=target))
    args, given = parse(modernise_argv(flags)[0], target=str(folder / "target"), drafter=str(folder / "drafter"))
    found = preflight(args, machine.GPUS["h100"]).findings
    return [*check_unread(given, args), *found]


@fuzz
@given(ARGV)
@example(["--lora-paths", "{}"])
def test_a_command(tmp_path: Path, words: list[str]) -> None:
    parser = ArgumentParser()
    accept_old_flags(None, parser)
    with judged():
        parser.parse_known_args(words)
    with judged(tmp_path):
        raise_first_error(check(tmp_path / "pair", *words, **HYBRID))


@fuzz
@given(data=st.data())
def test_a_folder(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Several files at once, under any name, through the whole check."""
    name = data.draw(st.sampled_from([card["drafter"] for card in published_pairs().values()]) | FOLDER_NAMES)
    folder = tmp_path_factory.mktemp("folder")
    write_pair(folder, Broken("", ""))
    drafter = (folder / "drafter").rename(folder / Path(name).name)
    for file in data.draw(st.sets(st.sampled_from(sorted(FILES)), max_size=3)):
        (drafter / file).write_bytes(data.draw(FILES[file][1]))
    with judged(folder):
        args, _ = parse([], target=str(folder / "target"), drafter=str(drafter))
        raise_first_error(preflight(args, machine.GPUS["h100"]).findings)


@fuzz
@given(st.dictionaries(st.sampled_from(VARIABLES), WORD, min_size=1))
def test_an_environment(tmp_path: Path, variables: dict[str, str]) -> None:
    with patch.dict(os.environ, variables):
        for read in (explain_environment, threads_of_a_rank, lambda _: parse_cores(variables.get(BIND_VARIABLE, ""))):
            with judged():
                read(variables)
        with judged(tmp_path):
            raise_first_error(check(tmp_path / "pair", **HYBRID))


@fuzz
@given(st.floats())
def test_a_machine(gib: float) -> None:
    with judged(refuse=not 0 < gib < float("inf")):
        machine.asked_about("cuda", gib)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--tp-size", "0"), ("--page-size", "-1"), ("--max-running-requests", "-5"), ("--max-running-requests", "9" * 30)]
    + [("--mem-fraction-static", "nan"), ("--mamba-full-memory-ratio", "nan"), ("--mamba-full-memory-ratio", "inf")]
    + [("--speculative-num-draft-tokens", value) for value in ("9" * 20, "0")]
    + [("--json-model-override-args", value) for value in ("[", "[]", "[" * 100_000)],
    ids=lambda text: text[:30],
)
def test_a_flag_that_nothing_can_be_computed_with(flag: str, value: str, tmp_path: Path) -> None:
    errors = [each for each in check(tmp_path / "pair", flag, value) if each.level == "error"]
    assert len(errors) == 1 and flag in errors[0].value


@pytest.mark.parametrize("variable", VARIABLES[:2])
def test_a_variable_with_an_unknown_word(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "bf17")
    finding = check(tmp_path / "pair", **HYBRID)[-1]
    assert finding.level == "error" and "bf17" in finding.value


@pytest.mark.parametrize("flags", [(), ("--trust-remote-code",)])
def test_a_drafters_own_code_does_not_run_with_the_targets(flags: tuple[str, ...], tmp_path: Path) -> None:
    errors = {each.about for each in check(tmp_path / "pair", *flags, code=True) if each.level == "error"}
    assert ("drafter's code" in errors) is bool(flags)
