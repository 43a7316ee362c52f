"""Every step of the kit at small sizes on the CPU platform, in the five calls that a machine with a GPU gets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import records, site
from tools.gpu.__main__ import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.sglang]

CALLS = [
    ("machine,kernels,engine",),
    ("steptimes",),
    ("replay,nosync", "--arms", "graphs"),
    ("sanitizer,card",),
    ("exact", "--arms", "replayed"),
]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call[0])
def test_a_call_passes_on_a_cpu(call: tuple[str, ...], tmp_path: Path) -> None:
    places = ["--device", site.CPU, "--site", str(tmp_path / "site"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "tools.gpu", *places, "--minutes", "30", "--steps", *call]
    patient = {**os.environ, "SERVER_START_SECONDS": "600"}
    ended = subprocess.run(command, cwd=site.ROOT, env=patient, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = {row["step"]: row["status"] for row in records.read(tmp_path / "out", records.STATUS)}
    assert found == {step: "skipped" if step == "sanitizer" else "passed" for step in call[0].split(",")}
    for step in found.keys() & {"engine", "steptimes"}:
        assert "builtin" in [row.get("arm") for row in records.read(tmp_path / "out", step)]


def test_the_calls_contain_every_step() -> None:
    assert ",".join(call[0] for call in CALLS).split(",") == list(STEPS)
