"""The wheelhouse's list: complete, and in step with what the repository pins elsewhere."""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools import wheelhouse
from tools.wheelhouse import Wheel

ROOT = wheelhouse.ROOT
WHEELS = {wheel.name.lower().replace("_", "-"): wheel for wheel in wheelhouse.read_list(wheelhouse.LIST.read_text())}
# They are the machine's own.
THERE = {"triton", "numpy"}


def test_versions_are_those_that_the_cpu_platform_is_tested_with() -> None:
    pinned = re.findall(r"^([\w.-]+)==(\S+)", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    assert len(pinned) > 20
    for name, version in pinned:
        if name.lower() not in THERE:
            assert WHEELS[name.lower()].requirement.partition("==")[2] == version, name


def test_sglang_is_the_one_that_make_setup_installs() -> None:
    (makefile,) = re.findall(r"^SGLANG_TESTED := (\S+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert WHEELS["sglang"].requirement == makefile


def test_an_imported_module_comes_along_whatever_the_patterns_say() -> None:
    wheel = Wheel("a==1", ("a/models/*",))
    imported = frozenset({"a.models", "a.models.used"})
    assert wheel.keeps("a/models/__init__.py", imported)
    assert wheel.keeps("a/models/used.py", imported)
    assert wheel.keeps("a/core.py", imported)
    assert not wheel.keeps("a/models/unused.py", imported)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("a/b/__init__.py", "a.b"),
        ("a/b/c.py", "a.b.c"),
        ("a/b/c.cpython-312-x86_64-linux-gnu.so", "a.b.c"),
        ("a.libs/libc-1f.so.6", "a.libs.libc-1f"),  # not the module "a"
        ("c.py", "c"),
    ],
)
def test_a_file_is_a_module(file: str, name: str) -> None:
    assert wheelhouse.module(file) == name


def test_what_comes_along_lies_where_an_installer_puts_it(tmp_path: Path) -> None:
    source = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(source, "w") as wheel:
        for name in ("a/x.py", "a/big.md", "a-1.data/purelib/a/y.py", "a-1.data/scripts/run", "a-1.dist-info/METADATA"):
            wheel.writestr(name, name)
    files = dict(wheelhouse.kept(source, Wheel("a==1", ("*.md",)), frozenset()))
    assert files.keys() == {"a/x.py", "a/y.py", "a-1.dist-info/METADATA"}
    archives = [tmp_path / name for name in ("one.tar.xz", "two.tar.xz")]
    for archive in archives:
        wheelhouse.pack(files, archive)
    assert archives[0].read_bytes() == archives[1].read_bytes()
    with tarfile.open(archives[0]) as packed:
        member = packed.extractfile("a/y.py")
        assert member is not None and io.BytesIO(member.read()).getvalue() == b"a-1.data/purelib/a/y.py"


def test_the_recorded_modules_are_those_of_a_dflash_run_on_a_device() -> None:
    """The worker that the kit compares with, the attention and the kernels that a device takes; both processes."""
    imported = wheelhouse.read_imported()
    assert {
        "sglang.srt.speculative.dflash_worker_v2",
        "sglang.srt.layers.attention.triton_backend",
        "sglang.kernels.ops.attention.extend_attention",
        "sglang.srt.models.qwen3_5",
        "sglang.srt.entrypoints.http_server",
        "sglang.srt.managers.detokenizer_manager",
    } <= imported
    # Compiled for another torch than the machine's (tools/gpu/unpack.py).
    assert "sglang.srt.mem_cache.rust_tree_core.mem_cache" not in imported


@pytest.mark.parametrize(
    ("file", "kept"),
    [
        # Without these two folders an import fails: "Cannot find sglang.kernels.jit path".
        ("sglang/kernels/jit/csrc/elementwise/rope.cuh", True),
        ("sglang/kernels/jit/include/sgl_kernel/utils.cuh", True),
        ("sglang/kernels/jit/csrc/moe/any.cuh", False),
        ("sglang/srt/mem_cache/rust_tree_core/mem_cache.cpython-312-x86_64-linux-gnu.so", False),
    ],
)
def test_what_of_sglang_comes_along(file: str, kept: bool) -> None:
    assert WHEELS["sglang"].keeps(file, wheelhouse.read_imported()) is kept


@pytest.mark.slow
def test_the_wheelhouse_can_travel_and_holds_every_recorded_module(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Needs a package index."""
    monkeypatch.setattr(wheelhouse, "ARCHIVE", tmp_path / "site.tar.xz")
    monkeypatch.setattr(wheelhouse, "ROOT", tmp_path)
    wheelhouse.build()
    with tarfile.open(tmp_path / "site.tar.xz") as packed:
        there = {wheelhouse.module(name) for name in packed.getnames()}
    assert wheelhouse.read_imported() <= there
