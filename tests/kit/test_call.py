"""The kit's one call without a GPU: whole at small sizes, and its start with the packages of a GPU machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tools import wheelhouse
from tools.gpu import rows, site
from tools.gpu.texts import CHOSEN

IMAGE = site.ROOT / ".cache/image/bin/python"


def call(python: str, folder: Path, *options: str, **environment: str) -> list[rows.Row]:
    """Run the call on the CPU platform; return its rows."""
    places = ["--device", site.CPU, "--site", str(folder / "site"), "--out", str(folder / "out")]
    command = [python, "-m", "tools.gpu", *places, "--seconds", "1500", *options]
    variables = {**os.environ, "SERVER_START_SECONDS": "900", **environment}
    ended = subprocess.run(command, cwd=site.ROOT, env=variables, capture_output=True, text=True, check=False)
    found = rows.read(folder / "out")
    failed = [row for row in found if "error" in row]
    assert ended.returncode == 0 and not failed, (failed, ended.stderr[-3000:])
    assert found[-1]["what"] == "end" and found[-1]["cut_off"] == []
    assert (folder / "out/page.md").read_text() == rows.page(found)
    with tarfile.open(folder / "out.tar.xz") as packed:
        assert {"out/page.md", f"out/{rows.FILE}"} <= {*packed.getnames()}
    return found


def of(found: list[rows.Row], what: str, *columns: str) -> set[Any]:
    chosen = [tuple(row.get(column) for column in columns) for row in found if row["what"] == what]
    assert len(chosen) == len(set(chosen)), chosen
    return set(chosen)


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_timed_server_has_its_rows(tmp_path: Path) -> None:
    found = call(sys.executable, tmp_path, "--only", "Qwen3.5-4B planned")
    assert of(found, "steps", "arm", "batch") == of(found, "tokens", "arm", "batch") == {("planned", 1)}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.sglang
@pytest.mark.timeout(1800)
def test_the_call_has_every_row(tmp_path: Path) -> None:
    found = call(sys.executable, tmp_path)
    arms = {(pair, arm) for pair, each in CHOSEN.items() for arm in ("plain", *each)}
    arms |= {("tiny-hybrid", "exact plain"), ("tiny-hybrid", "exact planned")}
    assert of(found, "texts", "pair", "arm") == arms
    assert all(row["wrong"] == 0 and row["accept"] > 1 for row in found if "wrong" in row)
    exact = [row["bits"] for row in found if row["what"] == "texts" and row["arm"].startswith("exact")]
    assert exact == [0, 0]
    served = ("planned", "one forward", "builtin", "plain", "adaptive")
    assert of(found, "steps", "arm", "batch") == {(arm, 1) for arm in served}
    assert [len(row["step_ms"]) for row in found if row["what"] == "steps"] == [1] * len(served)
    assert of(found, "tokens", "arm", "batch") == {("planned", 1), ("adaptive", 1)}
    costs = [row for row in found if row["what"] == "costs"]
    assert costs and all(row["milliseconds"].keys() >= {"1", "16"} and row["calibration_s"] > 0 for row in costs)
    assert of(found, "cases", "files") == {("tests/ops/cases.py",)}
    from tools.gpu.micro import CELLS  # it sets up Triton's interpreter only when it is the program

    assert {item for item, floor in of(found, "micro", "item", "floor_us") if floor > 0} == set(CELLS)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_the_call_starts_with_the_packages_of_a_gpu_machine(tmp_path: Path) -> None:
    """Python 3.12, torch for CUDA 13 and the wheelhouse; `make test-kit` installs them."""
    assert IMAGE.exists() and wheelhouse.ARCHIVE.exists(), "run `make test-kit`"
    found = call(str(IMAGE), tmp_path, "--only", "tiny-hybrid plain,tiny-hybrid prefix,cases", PYTHONPATH="")
    [machine] = [row for row in found if row["what"] == "machine"]
    assert machine["torch"] == "2.11.0+cu130" and machine["triton"] == "3.6.0" and machine["sglang"] == "0.5.23"
    assert of(found, "texts", "arm", "wrong") == {("plain", None), ("prefix hits", 0)}
    # every packed module loads with that torch's CUDA runtime, and exports its names
    environment = {**os.environ, **site.environment(tmp_path / "site")}
    program = "from tools.gpu import modules as m; print(len([m.load(key) for key in m.index()[1]]))"
    command = [IMAGE, "-c", program]
    loaded = subprocess.run(command, cwd=site.ROOT, env=environment, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0 and int(loaded.stdout) > 20, loaded.stderr
