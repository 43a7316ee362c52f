"""``launch/serve.sh``: the cards' commands on their GPU, today's defaults elsewhere, after the verdict of ``check``."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from sglang_dflash.launch.old_flags import modernise_argv
from tests.support.cards import FOLDER, NAMES, card

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch/serve.sh"
# On one GPU these flags change nothing, and SGLang has the code of every pair. The script listens where SGLang does.
LEFT_OUT = {"--trust-remote-code", "--enable-flashinfer-allreduce-fusion", "--tp-size", "--host", "--port"}
SAME = {"--speculative-dflash-block-size": "--speculative-num-draft-tokens"}
# Left out: SGLang chooses `extra_buffer` for DFLASH, a block is the drafter's, and fa3 runs on Hopper only
DEFAULTS = {"--mamba-radix-cache-strategy extra_buffer", "--speculative-num-draft-tokens 16", "--attention-backend fa3"}
# `check` in place of the real one: its arguments, as the command to start
STUB = '#!/bin/sh\nshift 3; echo "FITS"; echo "Start: echo started $*"\n'


@pytest.fixture
def stub(tmp_path: Path) -> Path:
    (tmp_path / "python").write_text(STUB)
    (tmp_path / "python").chmod(0o755)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The script with the ``python`` and ``nvidia-smi`` of a folder."""
    environment = {"PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run(
        [SCRIPT, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )


def checked(folder: Path, name: str, gpu: str) -> list[str]:
    """The words that the script passes to ``check``."""
    return shlex.split(run(folder, name.lower(), "--gpu", gpu).stdout)[2:]


def flags(words: list[str]) -> dict[str, str]:
    """Flag to value, in any order; a switch has an empty value."""
    pairs = zip(words, [*words[1:], "--"], strict=True)
    return {word: "" if value.startswith("--") else value for word, value in pairs if word.startswith("--")}


def test_shellcheck_is_clean() -> None:
    checker = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([checker, SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_pair_has_its_cards_flags_on_the_cards_gpu_and_no_backend_elsewhere(name: str, stub: Path) -> None:
    words = checked(stub, name, "b200")
    expected = {SAME.get(flag, flag): value for flag, value in flags(modernise_argv(card(name).arguments)[0]).items()}
    assert words[0] == expected.pop("--model-path") and words[1] == "auto"
    assert expected.pop("--speculative-draft-model-path") and expected.pop("--speculative-algorithm") == "DFLASH"
    expected = {k: v for k, v in expected.items() if k not in LEFT_OUT and f"{k} {v}" not in DEFAULTS}
    assert flags(words[2:]) == {"--gpu": "b200", **expected}
    elsewhere = flags(checked(stub, name, "h100"))
    assert not {flag for flag in elsewhere if "backend" in flag or "mem-fraction" in flag}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gpu", ["h100", "h200", "b200", "rtx-pro-6000", "rtx5090"])
def test_check_accepts_each_cards_flags_or_says_that_the_pair_does_not_fit(
    name: str, gpu: str, stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = checked(stub, name, gpu)
    (stub / "Qwen").mkdir()
    (stub / words[0]).symlink_to(FOLDER / name / "target")
    monkeypatch.chdir(stub)
    result = CliRunner().invoke(app, ["check", words[0], str(FOLDER / name / "drafter"), *words[2:]])
    fits = result.exit_code in (0, 1) and re.search(r"^Start: .*--model-path", result.output, re.MULTILINE)
    assert fits or "DOES NOT FIT" in result.output.splitlines()[0], result.output


def test_a_start_prints_the_verdict_and_becomes_the_server_with_the_users_flags_last(stub: Path) -> None:
    (stub / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA B200\n")
    (stub / "nvidia-smi").chmod(0o755)
    started = run(stub, "Qwen/Qwen3.5-27B", "--mem-fraction-static", "0.9", "--json-model-override-args", '{"a": 1}')
    words = "Qwen/Qwen3.5-27B auto --mem-fraction-static 0.75 --mem-fraction-static 0.9 --json-model-override-args"
    assert (started.returncode, started.stderr.splitlines()[0]) == (0, "FITS")
    assert started.stdout.startswith(f"started {words}")
    (stub / "python").write_text("#!/bin/sh\necho REFUSED; exit 2\n")
    refused = run(stub, "qwen3.5-27b")
    assert (refused.returncode, refused.stdout, refused.stderr) == (2, "", "REFUSED\n")


@pytest.mark.parametrize("pair", ["cards", ""])
def test_an_unknown_pair_is_named_with_the_known_ones(pair: str, tmp_path: Path) -> None:
    refused = run(tmp_path, *filter(None, [pair]))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"serve.sh: {'there is no pair cards' if pair else 'no pair is named'}\n")
    assert all(each.lower() in refused.stderr for each in NAMES)
