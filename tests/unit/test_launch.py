"""The launch scripts print the cards' commands, take their knobs from the environment, and are clean shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.check.old_flags import modernise_argv
from sglang_dflash.pairs import drafter_path, target_path
from tests.support.cards import FOLDER, NAMES, card

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path.name for path in LAUNCH.glob("*.sh") if path.name != "common.sh")


def script_of(name: str) -> str:
    return name.lower() + ".sh"


def run(script: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME")}
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, "PYTHON": sys.executable, **environment},
        cwd=ROOT,
    )


def flags(words: list[str]) -> dict[str, str]:
    """Flag to value, whatever the order; a switch has an empty value."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_every_card_has_its_script() -> None:
    assert {script_of(name) for name in NAMES} <= set(SCRIPTS)


def test_shellcheck_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    scripts = [*LAUNCH.glob("*.sh"), ROOT / "patches" / "apply.sh"]
    done = subprocess.run([checker, *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_a_script_and_starts_nothing(script: str) -> None:
    shown = run(script, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    first_line = (LAUNCH / script).read_text().splitlines()[1].removeprefix("# ")
    assert shown.stdout.startswith(first_line)
    assert "--dry-run" in shown.stdout


def test_the_demo_prints_its_command() -> None:
    printed = flags(shlex.split(run("demo.sh", "--dry-run", PAIR="tiny-moe", BLOCK_SIZE="8").stdout))
    assert printed["--model-path"] == str(target_path("tiny-moe"))
    assert printed["--speculative-draft-model-path"] == str(drafter_path("tiny-moe"))
    assert printed["--speculative-num-draft-tokens"] == "8"
    assert printed["--port"] == "30000"


@pytest.mark.parametrize("name", NAMES)
def test_a_script_prints_its_cards_command(name: str) -> None:
    printed = shlex.split(run(script_of(name), "--dry-run").stdout)
    start = printed.index(sys.executable)
    assert dict(word.split("=", 1) for word in printed[:start]) == card(name).environment
    assert printed[start : start + 3] == [sys.executable, "-m", "sglang.launch_server"]
    expected = flags(modernise_argv(card(name).arguments)[0])
    if "--enable-flashinfer-allreduce-fusion" in expected:  # deprecated: SGLang maps it to this
        del expected["--enable-flashinfer-allreduce-fusion"]
        expected["--flashinfer-allreduce-fusion-backend"] = "auto"
    assert flags(printed[start + 3 :]) == expected


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_reaches_the_command(name: str) -> None:
    help_text = run(script_of(name), "--help").stdout
    knobs = re.findall(r"^  ([A-Z_]+) ", help_text, flags=re.MULTILINE)
    assert len(knobs) > 12
    for knob in set(knobs) - {"PYTHON"}:
        assert f"4711{knob}" in run(script_of(name), "--dry-run", **{knob: f"4711{knob}"}).stdout


def test_variants_and_further_flags() -> None:
    variants = ("--multi-gpu", "--long-context", "--dry-run")
    printed = flags(shlex.split(run("qwen3.5-27b.sh", *variants, "--log-level", "debug").stdout))
    assert (printed["--tp-size"], printed["--speculative-draft-window-size"]) == ("2", "4096")
    assert printed["--log-level"] == "debug"
    chosen = flags(shlex.split(run("qwen3.5-27b.sh", *variants, TP="4", DRAFT_WINDOW="2048").stdout))
    assert (chosen["--tp-size"], chosen["--speculative-draft-window-size"]) == ("4", "2048")


def test_check_runs_the_preflight() -> None:
    pair = {part.upper(): str(FOLDER / "Qwen3.5-27B" / part) for part in ("target", "drafter")}
    done = run("qwen3.5-27b.sh", "--check", **pair)
    assert done.returncode == 1, done.stderr  # configurations without weights: warnings
    assert "Preflight" in done.stdout
    assert run("qwen3.5-27b.sh", "--check", **pair, BLOCK_SIZE="17").returncode == 2


def test_replicas_differ_in_gpu_and_port_only() -> None:
    first, second, router = run(
        "replicas.sh", "qwen3.5-27b.sh", "--dry-run", "--log-level", "debug"
    ).stdout.splitlines()
    assert first.startswith("CUDA_VISIBLE_DEVICES=0 ")
    assert first.replace("DEVICES=0", "DEVICES=1").replace("--port 30001", "--port 30002") == second
    assert "--log-level debug" in first
    assert router.endswith("http://127.0.0.1:30001 http://127.0.0.1:30002")


@pytest.mark.parametrize("arguments", [(), ("common",), ("nothing.sh",)])
def test_replicas_of_what_is_no_script_are_refused(arguments: tuple[str, ...]) -> None:
    refused = run("replicas.sh", *arguments)
    assert refused.returncode == 2
    assert "qwen3.5-27b.sh" in refused.stderr
