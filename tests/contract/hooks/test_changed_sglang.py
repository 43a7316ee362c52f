"""An SGLang that lacks what we call is refused in one message while the server resolves its flags."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.broken_pairs import Broken, write_pair

pytest.importorskip("sglang")

SCRIPT = Path(__file__).parent / "resolve_on_changed_sglang.py"


def resolve(folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), "--model-path", str(folder / "target"), *flags],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )


def test_everything_that_is_missing_is_in_one_message_and_plain_decoding_goes_on(tmp_path: Path) -> None:
    write_pair(tmp_path, Broken("fits", ""))
    drafter = ("--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(tmp_path / "drafter"))
    refused = resolve(tmp_path, *drafter)
    assert refused.returncode == 1
    [message] = [line for line in refused.stderr.splitlines() if "sglang_dflash.errors.DFlashError: " in line]
    assert "spec_utils.gone: not found" in message
    assert "parameters ['colour'] not in" in message
    assert resolve(tmp_path).returncode == 0
