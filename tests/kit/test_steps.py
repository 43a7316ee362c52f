"""Every step of the kit at small sizes on the CPU platform."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.gpu import records, site
from tools.gpu.__main__ import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.engine, pytest.mark.sglang]

ARMS = {"replay": "graphs", "nosync": "graphs", "exact": "replayed"}


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("step", STEPS)
def test_a_step_passes_on_a_cpu(step: str, tmp_path: Path) -> None:
    places = ["--device", site.CPU, "--site", str(tmp_path / "site"), "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "tools.gpu", *places, "--minutes", "30", "--steps", step]
    command += ["--arms", ARMS[step]] if step in ARMS else []
    environment = {**os.environ, "SERVER_START_SECONDS": "600"}
    ended = subprocess.run(command, cwd=site.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [ran] = records.read(tmp_path / "out", records.STATUS)
    assert (ran["step"], ran["status"]) == (step, "skipped" if step == "sanitizer" else "passed")
    if step in ("engine", "steptimes"):
        assert "builtin" in [row.get("arm") for row in records.read(tmp_path / "out", step)]
