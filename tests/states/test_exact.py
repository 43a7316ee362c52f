"""Exact verify and commit: with SGLang's kernel under Triton's interpreter, and with the CPU platform's function."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("interpret", ["1", "0"], ids=["SGLang's kernel, interpreted", "the CPU platform's function"])
def test_a_verify_and_a_commit_are_plain_decoding_bit_by_bit(interpret: str) -> None:
    # A process of its own: Triton decides at import whether to interpret.
    cases = Path(__file__).with_name("exact_cases.py")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(cases)],
        env={**os.environ, "TRITON_INTERPRET": interpret},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout and ("skipped" not in run.stdout or interpret == "0"), run.stdout
