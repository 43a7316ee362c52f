"""This machine's GPU, by torch in another process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dflash.check import machine
from sglang_dflash.check.machine import MIB, find_gpu
from sglang_dflash.launch.device import UNKNOWN_GPU, Device

H200 = Device("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), is_local=True)
FAKED = """
import torch
from types import SimpleNamespace
gpu = SimpleNamespace(name="NVIDIA H200", total_memory=143771 << 20, major=9, minor=0, is_integrated=0)
torch.cuda.get_device_properties = lambda index: [None, gpu][index]
torch.version.hip = {hip}
"""
UNKNOWN = Device("gpu", UNKNOWN_GPU.name, is_local=True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (FAKED.format(hip=None) + machine._ASK_TORCH, H200),
        (FAKED.format(hip="'7.2'") + machine._ASK_TORCH, replace(H200, capability=None, is_rocm=True)),
        ("raise SystemExit(1)", UNKNOWN),
        ("import time; time.sleep(600)", UNKNOWN),
    ],
    ids=["a GPU", "an AMD GPU", "one that torch cannot use", "a driver that hangs"],
)
def test_the_gpu_of_a_server(answer: str, expected: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER", [tmp_path])
    monkeypatch.setattr(machine, "_ASK_TORCH", answer)
    monkeypatch.setattr(machine, "_SECONDS", 2 if "time" in answer else 60)
    assert find_gpu(1) == expected


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER", [tmp_path / "absent"])
    assert find_gpu() is None
