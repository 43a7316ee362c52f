"""The rules are those of the machine that is asked about, whatever machine asks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from sglang_dflash.plan import machine
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import CPU, UNKNOWN_GPU, Machine, asked_about
from sglang_dflash.plan.report import Report, preflight
from tests.support.broken_pairs import Broken, write_pair

HERE = Machine("gpu", "NVIDIA H200", 141 << 30, (9, 0))
HYBRID: dict[str, Any] = {
    "model_type": "qwen3_next",
    "layer_types": ["linear_attention", "full_attention"] * 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


@pytest.mark.parametrize(
    ("gpu", "device", "memory_gib", "expected"),
    [
        (None, None, None, CPU),
        (None, "cuda", None, UNKNOWN_GPU),
        (None, None, 141, Machine("gpu", "a GPU with 141 GiB", 141 << 30)),
        (None, "cpu", 64, Machine("cpu", "a CPU with 64 GiB", 64 << 30)),
        (HERE, None, None, HERE),
        (HERE, "cpu", None, CPU),
        (HERE, None, 80, Machine("gpu", "a GPU with 80 GiB", 80 << 30)),
    ],
)
def test_the_machine_that_is_asked_about(
    gpu: Machine | None,
    device: str | None,
    memory_gib: float | None,
    expected: Machine,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "find_gpu", lambda _: gpu)
    assert asked_about(device, memory_gib) == expected


def report(folder: Path, on: Machine, *flags: str, **changes: Any) -> Report:
    write_pair(folder, Broken("", "", **changes))
    args = parse(flags, target=str(folder / "target"), drafter=str(folder / "drafter"))[0]
    return preflight(args, on)


def test_a_drafter_of_another_kind_is_left_to_sglangs_worker_on_a_gpu_only(tmp_path: Path) -> None:
    other = {"dflash_config": {"projector_type": "domino"}}
    on_gpu = report(tmp_path / "gpu", asked_about(None, 141), drafter=other).findings[-1]
    on_cpu = report(tmp_path / "cpu", CPU, drafter=other).findings[-1]
    assert (on_gpu.level, on_cpu.level) == ("warn", "error")
    assert "Domino" in on_gpu.value and "Domino" in on_cpu.value


def test_a_gpu_keeps_the_convolutions_inputs_in_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_MAMBA_CONV_DTYPE", raising=False)
    flags = ("--dtype", "float32")
    on_gpu = report(tmp_path / "gpu", asked_about(None, 141), *flags, target=HYBRID).memory
    on_cpu = report(tmp_path / "cpu", asked_about("cpu", 141), *flags, target=HYBRID).memory
    assert on_gpu and on_cpu
    assert on_cpu.served.sizing.kept.slot - on_gpu.served.sizing.kept.slot == 4 * 3 * (2 * 2 * 8 + 4 * 16) * 2


def test_a_pair_too_large_for_the_estimate_is_an_error_that_stops_no_server(tmp_path: Path) -> None:
    [finding] = [found for found in report(tmp_path, asked_about(None, 1e-4)).findings if found.level == "error"]
    assert finding.estimated and "weights and one request need more" in finding.value


def test_a_chat_template_that_was_given_is_no_warning(tmp_path: Path) -> None:
    levels = {found.about: found.level for found in report(tmp_path, CPU, "--chat-template", "t.jinja").findings}
    assert levels["chat template"] == "ok"


def test_nothing_is_cut_on_a_narrow_terminal(tmp_path: Path) -> None:
    folder = tmp_path / ("a-directory-with-a-long-name-" * 4)
    write_pair(folder, Broken("", ""))
    pair = (str(folder / "target"), str(folder / "drafter"))
    flags = ("--speculative-num-draft-tokens", "17", "--memory-gib", "141")
    printed = CliRunner().invoke(app, ["check", *pair, *flags], env={**os.environ, "COLUMNS": "40"}).stdout
    assert f"drafter: {pair[1]}\n" in printed
    assert "remedy: set --speculative-num-draft-tokens 16 or less, or leave it out\n" in printed
    assert "…" not in printed


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--dp-size", "2", "--tp-size", "2", "--enable-dp-attention"), "DP attention over 2 groups"),
        (("--attn-dp-size", "2", "--tp-size", "2"), "DP attention over 2 groups"),
        (("--enable-nvidia-megakernel",), "--enable-nvidia-megakernel"),
    ],
)
def test_what_a_server_refuses_is_refused(flags: tuple[str, ...], named: str, tmp_path: Path) -> None:
    found = report(tmp_path / "refused", asked_about(None, 141), *flags)
    [error] = [each for each in found.findings if each.level == "error"]
    assert named in error.value and not error.estimated and found.plan is None
    assert report(tmp_path / "replicas", asked_about(None, 141), "--dp-size", "2").plan is not None


@pytest.mark.parametrize(("word", "level"), [("builtin", "warn"), ("on", "error")])
def test_the_switch_of_the_worker_is_read(
    word: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH", word)
    found = report(tmp_path, asked_about(None, 141))
    assert [each.level for each in found.findings] == [level] and found.plan is None
    assert word in found.findings[0].value


@pytest.mark.parametrize(
    "flags", [("--enable-watermark",), ("--attn-cp-size", "2"), ("--speculative-accept-threshold-acc", "0.9")]
)
def test_what_is_left_to_sglangs_worker_is_warned_of(flags: tuple[str, ...], tmp_path: Path) -> None:
    found = report(tmp_path / "gpu", asked_about(None, 141), *flags)
    assert (found.findings[-1].level, found.findings[-1].about, found.plan) == ("warn", "worker", None)
    on_cpu = report(tmp_path / "cpu", CPU, *flags)
    assert on_cpu.findings[-1].level == "error"


@pytest.mark.parametrize(
    ("flag", "stored", "level"),
    [("fp8", None, "warn"), ("fp8", "fp8", "ok"), ("modelopt_fp8", "modelopt", "ok"), ("awq", "fp8", "warn")],
)
def test_weights_are_counted_as_they_are_stored(flag: str, stored: str | None, level: str, tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": stored}} if stored else {}
    found = report(tmp_path, asked_about(None, 141), "--quantization", flag, target=config).findings
    assert {each.about: each.level for each in found}["target's quantisation"] == level


def test_a_misspelt_flag_ends_with_the_nearest_name(tmp_path: Path) -> None:
    write_pair(tmp_path, Broken("", ""))
    words = (str(tmp_path / "target"), str(tmp_path / "drafter"), "--speculative-num-draft-tokns", "16")
    ended = CliRunner().invoke(app, ["check", *words])
    assert ended.exit_code == 2 and "set --speculative-num-draft-tokens" in ended.stdout
