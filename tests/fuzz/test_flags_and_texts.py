"""What fuzzing found in flags, environment variables, targets' sizes and the texts that a terminal is shown."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash.check import remedies
from sglang_dflash.check.drafter_files import check_code
from sglang_dflash.check.findings import judge
from sglang_dflash.check.old_flags import modernise_kwargs
from sglang_dflash.check.options import parse
from sglang_dflash.check.preflight import Report, preflight
from sglang_dflash.cpu.arguments.threads import parse_cores, threads_of_a_rank
from sglang_dflash.errors import LONGEST, DFlashError
from sglang_dflash.memory.machine import GPUS, asked_about
from sglang_dflash.memory.machine import parse as parse_driver
from sglang_dflash.memory.units import MIB
from sglang_dflash.width import read_config
from tests.support.broken_pairs import Broken, write_pair


def check(folder: Path, *flags: str, **target: Any) -> Report:
    write_pair(folder, Broken("", "", target=target))
    args, _, _ = parse(["--dtype", "bfloat16", *flags], target=str(folder / "target"), drafter=str(folder / "drafter"))
    return preflight(args, GPUS["h100"])


@pytest.mark.parametrize(
    "flags",
    [
        ("--tp-size", "0"),
        ("--page-size", "-1"),
        ("--max-running-requests", "-5"),
        ("--max-running-requests", "9" * 30),
        ("--mem-fraction-static", "nan"),
        ("--mamba-full-memory-ratio", "nan"),
        ("--mamba-full-memory-ratio", "inf"),
        ("--speculative-num-draft-tokens", "9" * 20),
        ("--speculative-num-draft-tokens", "0"),
        ("--json-model-override-args", "["),
        ("--json-model-override-args", "[]"),
        ("--json-model-override-args", "[" * 100_000),
    ],
    ids=lambda flags: " ".join(flags)[:50],
)
def test_a_flag_that_nothing_can_be_computed_with_is_named(flags: tuple[str, str], tmp_path: Path) -> None:
    errors = [finding for finding in check(tmp_path, *flags).findings if finding.level == "error"]
    assert len(errors) == 1 and flags[0] in errors[0].value


def test_a_value_that_argparse_loses(tmp_path: Path) -> None:
    """It makes an empty list of two dashes."""
    assert check(tmp_path, "--kv-cache-dtype=--").memory is not None


@pytest.mark.parametrize(
    "target",
    [
        {"intermediate_size": "x"},
        {"intermediate_size": 10**400},
        {"num_key_value_heads": -1},
        {"torch_dtype": "float128"},
        {"model_type": ["qwen3"]},
        {"layer_types": ["linear_attention"] * 8, "model_type": "qwen3_next"},
    ],
    ids=json.dumps,
)
def test_a_target_of_strange_sizes_is_left_to_sglang(target: dict[str, Any], tmp_path: Path) -> None:
    """Its memory is not divided, which stops no server."""
    flags = ("--dtype", "auto") if "torch_dtype" in target else ()
    report = check(tmp_path, *flags, **target)
    assert report.memory is None
    assert all(finding.estimated or finding.level != "error" for finding in report.findings)
    assert report.findings[-1].about == "memory"


def test_a_target_that_states_no_layers_is_an_error(tmp_path: Path) -> None:
    report = check(tmp_path, num_hidden_layers=10**400, architectures=5)
    assert any(finding.level == "error" for finding in report.findings)


@pytest.mark.parametrize(
    "variable", ["SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE", "SGLANG_DFLASH_STATE_REPLAY"]
)
def test_a_variable_with_an_unknown_word(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "bf17")
    sizes = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    hybrid = {f"linear_{name}": 4 for name in sizes}
    report = check(tmp_path, model_type="qwen3_next", full_attention_interval=4, **hybrid)
    assert report.findings[-1].level == "error" and "bf17" in report.findings[-1].value


@pytest.mark.parametrize("text", ["a", "1-", "-3", "0-99999999999", "9" * 5000, "²"])
def test_cores_that_no_machine_has(text: str) -> None:
    with pytest.raises(DFlashError, match="SGLANG_CPU_OMP_THREADS_BIND"):
        parse_cores(text)


@pytest.mark.parametrize("value", ["", "many", "0", "-1", "9" * 5000])
def test_threads_that_are_no_number(value: str) -> None:
    with pytest.raises(DFlashError, match="OMP_NUM_THREADS"):
        threads_of_a_rank({"OMP_NUM_THREADS": value})


def test_threads_of_nested_teams() -> None:
    assert threads_of_a_rank({"OMP_NUM_THREADS": "4,2"}) == 4
    assert threads_of_a_rank({}) == 1


def test_a_driver_that_does_not_know_its_memory() -> None:
    """As on a machine whose GPU shares it."""
    machine = parse_driver("NVIDIA GB10, [N/A], 12.1\n")
    assert machine is not None and (machine.memory, machine.capability) == (None, (12, 1))
    machine = parse_driver("NVIDIA H100, 81559, [N/A]\n")
    assert machine is not None and (machine.memory, machine.capability) == (81559 * MIB, None)


@pytest.mark.parametrize("gib", [float("nan"), float("inf"), -1.0, 0.0])
def test_memory_that_no_machine_has(gib: float) -> None:
    with pytest.raises(DFlashError, match="--memory-gib"):
        asked_about("cuda", gib)


def test_keywords_that_are_not_ours_stay_as_they_are() -> None:
    given = {"a-b": 1, "a_b": 2, "--x": 3, "cuda_graph_backend_prefill": ["tc_piecewise"]}
    assert modernise_kwargs(given) == (given, [])


def test_advice_tries_a_thousand_values_of_a_flag_at_most() -> None:
    now = SimpleNamespace(max_running=1 << 20)
    before = SimpleNamespace(running=1)
    tried = range(now.max_running - 1, before.running, -remedies.step_down(now, before))  # type: ignore[arg-type]
    assert 500 < len(tried) <= 1024
    now.max_running = 48
    assert remedies.step_down(now, before) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["[" * 100_000, '{"seed": 1' + "0" * 5000 + "}"])
def test_a_width_file_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "width.json").write_text(text)
    with pytest.raises(DFlashError, match=r"--speculative-adaptive-config: .*width\.json"):
        read_config(str(tmp_path / "width.json"))


def test_a_path_that_no_file_can_have() -> None:
    with pytest.raises(DFlashError, match="--speculative-adaptive-config"):
        read_config("a\x00b")


def test_an_errors_text_can_be_shown_and_is_short() -> None:
    error = DFlashError("\x1b[2J\n\ud800 é", expected="\x07", remedy="none")
    assert error.value == "\\x1b[2J\\n\\ud800 é" and error.expected == "\\x07"
    assert str(error).encode()
    assert len(DFlashError("x" * 10**6, expected="y", remedy="z").value) <= LONGEST + 3


def test_a_finding_that_quotes_a_file_can_be_shown() -> None:
    assert judge("about", lambda: "\x1b]0;title\x07").value == "\\x1b]0;title\\x07"


CODE = {"AutoConfig": "configuration.Own", "AutoModel": "dflash.DFlashDraftModel"}


def test_a_drafters_own_code_does_not_run_with_the_targets() -> None:
    with pytest.raises(DFlashError, match="configuration.Own"):
        check_code({"auto_map": CODE}, trusted=True)


@pytest.mark.parametrize("named", [{"AutoModel": "dflash.DFlashDraftModel"}, None, ["AutoConfig"]])
def test_what_sglang_does_not_run_is_not_refused(named: Any) -> None:
    assert check_code({"auto_map": named}, trusted=True) == check_code({"auto_map": CODE}, trusted=False)


def test_the_check_reads_the_flag(tmp_path: Path) -> None:
    write_pair(tmp_path, Broken("", "", drafter={"auto_map": CODE}))
    for flags, expected in (((), False), (("--trust-remote-code",), True)):
        args, _, _ = parse(flags, target=str(tmp_path / "target"), drafter=str(tmp_path / "drafter"))
        refused = {finding.about for finding in preflight(args, GPUS["h100"]).findings if finding.level == "error"}
        assert ("drafter's code" in refused) is expected
