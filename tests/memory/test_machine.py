"""This machine's GPU: by nvidia-smi, or by torch where that program is missing or does not know."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from sglang_dflash.memory import machine
from sglang_dflash.memory.machine import GPUS, MIB, Machine, find_gpu

H200 = "NVIDIA H200, {}, 9.0"
TORCH = """
from types import SimpleNamespace
properties = SimpleNamespace(name="NVIDIA H200", total_memory=143771 << 20, major=9, minor=0)
cuda = SimpleNamespace(is_available=lambda: {available}, get_device_properties=lambda index: properties)
"""


@pytest.mark.parametrize(
    ("program", "has_gpu", "memory", "told_by"),
    [
        (H200.format(143771), False, 143771, "nvidia-smi"),
        (None, True, 143771, "torch"),
        (H200.format("[N/A]"), True, 143771, "torch"),
        ("exit 9", True, 143771, "torch"),
        (H200.format("[N/A]"), False, None, "torch"),
        (None, False, None, None),
    ],
    ids=["nvidia-smi", "no nvidia-smi", "it does not know", "it fails", "nobody knows", "no GPU"],
)
def test_the_gpus_memory_is_told_by_one_of_two(
    program: str | None,
    has_gpu: bool,
    memory: int | None,
    told_by: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are asked in processes of their own; this one loads no torch for it."""
    if program is not None:
        script = tmp_path / "nvidia-smi"
        script.write_text(f"#!/bin/sh\n{program if program.startswith('exit') else f'echo {program!r}'}\n")
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "torch.py").write_text(TORCH.format(available=has_gpu))
    monkeypatch.setattr(machine, "_DRIVER", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = find_gpu()
    if told_by is None:
        assert found is None
    else:
        expected = GPUS["h200"].memory if memory else None
        assert found == Machine("gpu", "NVIDIA H200", expected, (9, 0), told_by)  # type: ignore[arg-type]
        assert memory is None or found.memory == memory * MIB
    assert "torch" not in sys.modules or sys.modules["torch"].__file__ != str(tmp_path / "torch.py")


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("told", "line"),
    [
        (Machine("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), "nvidia-smi"), None),
        (Machine("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), "torch"), "by torch, NVIDIA H200 has 140.40 GiB"),
        (Machine("gpu", "NVIDIA GB10", None, (12, 1), "torch"), "neither nvidia-smi nor torch tells the memory"),
        (None, "recurrent states are kept"),
    ],
)
def test_a_launch_says_which_answer_it_goes_by(
    told: Machine | None, line: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = pytest.importorskip("sglang") and pytest.importorskip("sglang_dflash.hooks.launch")
    monkeypatch.setattr(launch, "on_our_cpu_platform", lambda: False)
    monkeypatch.setattr(launch, "find_gpu", lambda: told)
    launch.this_machine.__wrapped__()
    assert (line in caplog.text) if line else not caplog.records
