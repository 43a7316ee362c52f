"""The wheelhouse: what is packed, and what an interpreter finds once it is unpacked."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib.metadata import distributions
from pathlib import Path

import pytest

from tools import wheelhouse
from tools.gpu import site

ROOT = wheelhouse.ROOT


def test_versions_are_those_that_make_setup_installs() -> None:
    listed = {requirement.lower() for requirement in wheelhouse.read_list(wheelhouse.LIST.read_text())}
    text = (ROOT / "requirements/cpu.txt").read_text() + (ROOT / "Makefile").read_text()
    pinned = re.findall(r"^(?:SGLANG_TESTED := )?([\w.-]+)==(\S+)", text, re.MULTILINE)
    left_out = ("triton", "numpy", "uvloop", "openai-harmony")  # other versions, and what no step of the kit imports
    wanted = {f"{name}=={version}".lower() for name, version in pinned if name not in left_out}
    assert {each.replace("_", "-") for each in wanted} <= {each.replace("_", "-") for each in listed}
    assert len(pinned) > 20


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel, packed and unpacked."""
    source = tmp_path / "a-1-py3-none-any.whl"
    left_out = ("a/big.md", "a/models/unused.py", "a-1.data/scripts/run")
    names = ("a/x.py", "a/models/used.py", "a-1.data/purelib/b.py", *left_out)
    with zipfile.ZipFile(source, "w") as wheel:
        for name in names:
            wheel.writestr(name, "answer = 42\n")
    files = dict(wheelhouse.kept(source, ("*.md", "a/models/*"), frozenset({"a.models.used"})))
    assert files.keys() == {"a/x.py", "a/models/used.py", "b.py"}
    monkeypatch.setattr(site, "ARCHIVE", tmp_path / "site.tar.xz")
    monkeypatch.setattr(site, "find_spec", lambda name: None)  # nothing is installed
    wheelhouse.pack(files, site.ARCHIVE)
    site.unpack(tmp_path / "site")
    return tmp_path / "site"


@pytest.mark.parametrize("device", [site.CUDA, site.CPU])
def test_a_process_finds_the_wheels_the_checkout_and_stand_ins_where_kernels_are_called(
    folder: Path, device: str
) -> None:
    found = {each.name: {entry.name for entry in each.entry_points} for each in distributions(path=[str(folder)])}
    lab = {"sglang-dflash-lab": {"bench", "report", "pairs"}}
    kit = {"sglang-dflash": {"dflash"}, "sglang-dflash-cpu": {"dflash_cpu"}, "gpu-kit": {"gpu_kit"}}
    assert found == kit | lab
    program = """
import importlib.util, sys, b, uvloop
hooked = any(type(finder).__name__ == "_BeforeTorchvision" for finder in sys.meta_path)
print(b.answer, hooked, importlib.util.find_spec("sgl_kernel") is not None, hasattr(uvloop, "Loop"))
"""
    environment = site.environment(folder, device)
    run = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["42", "True", str(device == site.CUDA), "False"]
