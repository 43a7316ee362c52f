"""Unpacking the wheelhouse: what an interpreter then finds, and what it does first."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tools import wheelhouse
from tools.gpu import unpack


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    archive = tmp_path / "site.tar.xz"
    wheelhouse.pack({"brought_along.py": b"answer = 42\n"}, archive)
    monkeypatch.setattr(unpack, "ARCHIVE", archive)
    unpack.unpack(tmp_path / "site")
    return tmp_path / "site"


def test_this_checkout_is_found_with_its_entry_points_and_the_kit_with_its_own(site: Path) -> None:
    found = {each.name: {entry.name for entry in each.entry_points} for each in distributions(path=[str(site)])}
    assert found == {"sglang-dflash": {"dflash", "dflash_cpu"}, "gpu-kit": {"gpu_kit"}}


@pytest.mark.parametrize("device", [unpack.CUDA, unpack.CPU])
def test_a_process_starts_with_the_kit(site: Path, device: str) -> None:
    """The stand-ins are on the path where CUDA kernels would be called, and nowhere else."""
    program = """
import importlib.util, sys, brought_along, tools.gpu.startup
hooked = any(type(finder).__name__ == "_BeforeTorchvision" for finder in sys.meta_path)
print(brought_along.answer, hooked, importlib.util.find_spec("sgl_kernel") is not None)
"""
    environment = unpack.environment(site, device)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["42", "True", str(device == unpack.CUDA)]
    assert environment["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] == "python"


def test_what_was_unpacked_is_left_alone_until_the_wheelhouse_changes(site: Path) -> None:
    (site / "brought_along.py").unlink()
    unpack.unpack(site)
    assert not (site / "brought_along.py").exists()
    wheelhouse.pack({"brought_along.py": os.urandom(1000)}, unpack.ARCHIVE)
    unpack.unpack(site)
    assert (site / "brought_along.py").exists()


def test_without_a_wheelhouse_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(unpack, "ARCHIVE", tmp_path / "none.tar.xz")
    with pytest.raises(SystemExit, match="none.tar.xz is missing: run `make wheelhouse` on a machine"):
        unpack.unpack(tmp_path)
