"""Exact verify and commit: with SGLang's kernel under Triton's interpreter, and with the CPU platform's function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize(
    "interpret",
    [
        pytest.param("1", id="SGLang's kernel, interpreted", marks=pytest.mark.slow),
        pytest.param("0", id="the CPU platform's function"),
    ],
)
def test_a_verify_and_a_commit_are_plain_decoding_bit_by_bit(interpret: str) -> None:
    printed = passed("exact_cases.py", interpret)
    assert "skipped" not in printed or interpret == "0", printed


def test_sglangs_kernels_agree_with_ours_under_the_interpreter() -> None:
    assert "skipped" not in passed("sglang_cases.py", "1")


def passed(file: str, interpret: str, *options: str) -> str:
    """Run a file of this folder, and return what is printed; a separate process, as Triton decides at import."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, str(Path(__file__).with_name(file))],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and " passed" in run.stdout, run.stdout + run.stderr
    return run.stdout
