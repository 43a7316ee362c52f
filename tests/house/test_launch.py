"""The launch scripts print the cards' commands, read prefixed variables, check before a start, and are clean shell."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash.hooks.flags import modernise_argv
from tests.support.cards import FOLDER, NAMES, card
from tests.support.cuda_driver import driver

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
PREFIX = "SGLANG_DFLASH_"
PAIRS = [*(name.lower() for name in NAMES), "demo"]


def run(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The script with ``variables``, which get the prefix unless they are ``LD_LIBRARY_PATH``."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("SGLANG_")}
    given = {key if key == "LD_LIBRARY_PATH" else f"{PREFIX}{key}": value for key, value in variables.items()}
    return subprocess.run(
        [str(LAUNCH / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**clean, f"{PREFIX}PYTHON": sys.executable, **given},
        cwd=ROOT,
    )


def program(folder: Path, name: str, body: str) -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def serve(pair: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return run("serve.sh", pair, *arguments, **environment)


def flags(words: list[str]) -> dict[str, str]:
    """Flag to value, whatever the order; a switch has an empty value."""
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            found[word] = "" if following.startswith("--") else following
    return found


def test_the_table_has_every_card() -> None:
    shown = run("serve.sh", "--help").stdout.splitlines()[0]
    assert set(shown.rpartition(": ")[2].split()) == set(PAIRS)


def test_shellcheck_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, *LAUNCH.glob("*.sh")], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("pair", PAIRS)
def test_help_explains_a_pair_and_starts_nothing(pair: str) -> None:
    shown = serve(pair, "--help")
    assert (shown.returncode, shown.stderr) == (0, "")
    about = "A pair that ships" if pair == "demo" else f"{card_name(pair)} with "
    assert shown.stdout.startswith(about)
    assert "--dry-run" in shown.stdout


def card_name(pair: str) -> str:
    return next(name for name in NAMES if name.lower() == pair)


@pytest.mark.parametrize("script", ["serve.sh", "replicas.sh"])
@pytest.mark.parametrize("arguments", [(), ("cards",), ("qwen3.5-27b.sh",), ("--dry-run",)])
def test_an_unknown_pair_is_named_with_the_known_ones(script: str, arguments: tuple[str, ...]) -> None:
    refused = run(script, *arguments)
    assert (refused.returncode, refused.stdout) == (2, "")
    found = f"there is no pair {arguments[0]}" if arguments else "name a pair"
    assert refused.stderr.startswith(f"{script}: {found}\n")
    assert all(pair in refused.stderr for pair in PAIRS)


def test_a_pair_is_named_in_any_case_or_by_its_targets_hub_id() -> None:
    printed = {serve(name, "--dry-run").stdout for name in ("qwen3.5-27b", "Qwen3.5-27B", "Qwen/Qwen3.5-27B")}
    assert len(printed) == 1 and "Qwen/Qwen3.5-27B" in printed.pop()


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_prints_its_cards_command_on_the_cards_gpu(name: str, tmp_path: Path) -> None:
    printed = shlex.split(serve(name.lower(), "--dry-run", LD_LIBRARY_PATH=driver(tmp_path, "NVIDIA B200")).stdout)
    start = printed.index(sys.executable)
    assert dict(word.split("=", 1) for word in printed[:start]) == card(name).environment
    assert printed[start : start + 3] == [sys.executable, "-m", "sglang.launch_server"]
    expected = flags(modernise_argv(card(name).arguments)[0])
    if "--enable-flashinfer-allreduce-fusion" in expected:  # deprecated: SGLang maps it to this
        del expected["--enable-flashinfer-allreduce-fusion"]
        expected["--flashinfer-allreduce-fusion-backend"] = "auto"
    assert flags(printed[start + 3 :]) == expected


def test_the_memory_fraction_is_left_to_sglang_on_another_gpu_unless_it_is_set(tmp_path: Path) -> None:
    path = driver(tmp_path, "NVIDIA H100 80GB HBM3")
    printed = serve("qwen3.5-27b", "--dry-run", LD_LIBRARY_PATH=path).stdout
    assert "--mem-fraction-static" not in flags(shlex.split(printed))
    for words, variables in ((("--gpu", "b200"), {}), ((), {"MEM_FRACTION": "0.75"})):
        printed = serve("qwen3.5-27b", "--dry-run", *words, LD_LIBRARY_PATH=path, **variables).stdout
        assert flags(shlex.split(printed))["--mem-fraction-static"] == "0.75"


def test_a_variable_without_the_prefix_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = serve("qwen3.5-27b", "--dry-run").stdout
    monkeypatch.setenv("DTYPE", "float64")
    monkeypatch.setenv("TP", "4")
    assert serve("qwen3.5-27b", "--dry-run").stdout == before


@pytest.mark.parametrize("name", NAMES)
def test_every_knob_reaches_the_command(name: str) -> None:
    help_text = serve(name.lower(), "--help").stdout
    knobs = re.findall(rf"^  {PREFIX}([A-Z_]+) ", help_text, flags=re.MULTILINE)
    assert len(knobs) > 12
    values = {knob: f"4711{knob}" for knob in knobs if knob != "PYTHON"}
    printed = serve(name.lower(), "--dry-run", **values).stdout
    assert not [value for value in values.values() if value not in printed]


def test_variants_and_further_flags() -> None:
    variants = ("--multi-gpu", "--long-context", "--dry-run")
    printed = flags(shlex.split(serve("qwen3.5-27b", *variants, "--log-level", "debug").stdout))
    assert (printed["--tp-size"], printed["--speculative-draft-window-size"]) == ("2", "4096")
    assert printed["--log-level"] == "debug"
    chosen = flags(shlex.split(serve("qwen3.5-27b", *variants, TP="4", DRAFT_WINDOW="2048").stdout))
    assert (chosen["--tp-size"], chosen["--speculative-draft-window-size"]) == ("4", "2048")


def test_check_runs_the_preflight() -> None:
    pair = {part.upper(): str(FOLDER / "Qwen3.5-27B" / part) for part in ("target", "drafter")}
    done = serve("qwen3.5-27b", "--check", **pair)
    assert done.returncode == 1, done.stderr  # configurations without weights: warnings
    assert pair["DRAFTER"] in done.stdout
    assert serve("qwen3.5-27b", "--check", **pair, BLOCK_SIZE="17").returncode == 2


def test_a_start_prints_the_preflights_verdict_and_then_becomes_the_server(tmp_path: Path) -> None:
    said = 'case "$2" in *.cli) echo "FITS: $3"; exit 1 ;; *) echo "served by $2 as process $$: $*" ;; esac'
    python = program(tmp_path, "python", said)
    started = serve("qwen3.5-27b", "--enable-metrics", PYTHON=str(python), MEM_FRACTION="")
    assert started.returncode == 0
    assert started.stderr == "FITS: check\n"
    assert started.stdout.startswith("served by sglang.launch_server") and "--enable-metrics" in started.stdout


def test_replicas_differ_in_gpu_and_port_only() -> None:
    first, second, router = run(
        "replicas.sh", "qwen3.5-27b", "--dry-run", "--multi-gpu", "--log-level", "debug"
    ).stdout.splitlines()
    assert first.startswith("CUDA_VISIBLE_DEVICES=0 ")
    assert first.replace("DEVICES=0", "DEVICES=1").replace("--port 30001", "--port 30002") == second
    assert "--tp-size 2" in first and "--log-level debug" in first
    assert router.endswith("http://127.0.0.1:30001 http://127.0.0.1:30002")
