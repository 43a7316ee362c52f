"""This machine's GPU, by torch in another process."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.check import machine
from sglang_dflash.check.machine import MIB, find_gpu
from sglang_dflash.plan.device import UNKNOWN_GPU, Device

H200 = Device("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), is_local=True)
UNKNOWN = Device("gpu", UNKNOWN_GPU.name, is_local=True)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("import sys; print('NVIDIA H200', 143771 << 20, 9, int(sys.argv[1]) - 1, sep='\\n')", H200),
        ("raise SystemExit(1)", UNKNOWN),
        ("import time; time.sleep(600)", UNKNOWN),
    ],
    ids=["a GPU", "one that torch cannot use", "a driver that hangs"],
)
def test_the_gpu_of_a_server(answer: str, expected: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER", [tmp_path])
    monkeypatch.setattr(machine, "_ASK_TORCH", answer)
    monkeypatch.setattr(machine, "_SECONDS", 2)
    assert find_gpu(1) == expected


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_DRIVER", [tmp_path / "absent"])
    assert find_gpu() is None
