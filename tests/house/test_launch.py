"""The launch scripts print the cards' commands, read prefixed variables, check before a start, and are clean shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.launch.old_flags import modernise_argv
from sglang_dflash.launch.published import drafter_of
from tests.support.cards import NAMES, card

ROOT = Path(__file__).parents[2]
PREFIX = "SGLANG_DFLASH_"


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script with ``variables``, which get the prefix."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    given = {f"{PREFIX}{key}": value for key, value in {"PYTHON": sys.executable, **variables}.items()}
    command, environment = [str(ROOT / "launch" / script), *arguments], {**clean, **given}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=ROOT)


def flags(words: list[str]) -> dict[str, str]:
    """Flag to value, whatever the order; a switch has an empty value."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_shellcheck_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *ROOT.glob("launch/*.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_prints_its_cards_command_on_the_cards_gpu(name: str) -> None:
    printed = shlex.split(run("serve.sh", name.lower(), "--dry-run", "--gpu", "b200").stdout)
    start = printed.index(sys.executable)
    assert dict(word.split("=", 1) for word in printed[:start]) == card(name).environment
    assert printed[start : start + 3] == [sys.executable, "-m", "sglang.launch_server"]
    expected = flags(modernise_argv(card(name).arguments)[0])
    expected.pop("--trust-remote-code", None)  # SGLang has the code of every pair
    if "--enable-flashinfer-allreduce-fusion" in expected:  # deprecated: SGLang maps it to this
        del expected["--enable-flashinfer-allreduce-fusion"]
        expected["--flashinfer-allreduce-fusion-backend"] = "auto"
    assert flags(printed[start + 3 :]) == expected
    elsewhere = run("serve.sh", name.lower(), "--dry-run", "--gpu", "h100").stdout
    assert ("--mem-fraction-static" in elsewhere) == ("H100" in name), "SGLang's fraction on another GPU"


@pytest.mark.parametrize("script", ["serve.sh", "replicas.sh"])
def test_an_unknown_pair_is_named_with_the_known_ones(script: str) -> None:
    refused = run(script, "cards")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"{script}: there is no pair cards\n")
    assert all(pair in refused.stderr for pair in (*map(str.lower, NAMES), "demo"))


def test_a_start_prints_the_checks_verdict_and_then_becomes_the_server(tmp_path: Path) -> None:
    python = tmp_path / "python"
    said = 'case "$2" in *.cli) echo "FITS: $3"; exit 1 ;; *) echo "served by $2: $*" ;; esac'
    python.write_text(f"#!/bin/sh\n{said}\n")
    python.chmod(0o755)
    variables = {"PYTHON": str(python), "MEM_FRACTION": "", "TP": "4"}
    started = run("serve.sh", "qwen3.5-27b", "--multi-gpu", "--enable-metrics", **variables)
    assert (started.returncode, started.stderr) == (0, "FITS: check\n")
    assert started.stdout.startswith("served by sglang.launch_server")
    assert "--enable-metrics" in started.stdout and "--tp-size 4" in started.stdout
    checked = run("serve.sh", "qwen3.5-27b", "--check", PYTHON=str(python))
    assert (checked.returncode, checked.stdout) == (1, "FITS: check\n")


def test_the_command_for_an_rtx_5090_is_the_readmes() -> None:
    """``tests/house/test_documents.py`` checks that one."""
    readme = (ROOT / "README.md").read_text().replace("\\\n", " ")
    [shown] = re.findall("launch_server (--model-path RadixArk.*)", readme)
    printed = flags(shlex.split(run("serve.sh", "qwen3.8-27b", "--dry-run", "--gpu", "5090").stdout))
    drafter = {"--speculative-draft-model-path": drafter_of("RadixArk/Qwen3.8-27B-NVFP4")}  # README: auto
    assert (flags(shlex.split(shown)) | drafter).items() <= printed.items() and "--gpu" not in printed


def test_replicas_differ_in_gpu_and_port_only() -> None:
    first, second, router = run("replicas.sh", "qwen3.5-27b", "--dry-run", "--multi-gpu").stdout.splitlines()
    assert first.startswith("CUDA_VISIBLE_DEVICES=0 ") and "--tp-size 2" in first
    assert first.replace("DEVICES=0", "DEVICES=1").replace("--port 30001", "--port 30002") == second
    assert router.endswith("http://127.0.0.1:30001 http://127.0.0.1:30002")
