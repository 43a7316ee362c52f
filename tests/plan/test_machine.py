"""This machine's GPU, by the CUDA driver."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_dflash.check import machine
from sglang_dflash.check.machine import MIB, find_gpu
from sglang_dflash.plan.device import UNKNOWN_GPU, Device
from tests.support.cuda_driver import driver

H200 = Device("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), is_local=True)
UNKNOWN = Device("gpu", UNKNOWN_GPU.name, is_local=True)


@pytest.mark.parametrize(
    ("base", "init", "expected"),
    [
        (0, "return 0;", H200),
        (1, "return 0;", H200),
        (2, "return 0;", UNKNOWN),  # CUDA_ERROR_INVALID_DEVICE
        (0, "return 100;", None),  # CUDA_ERROR_NO_DEVICE
        (0, "return 803;", UNKNOWN),  # the driver and its library differ
        (0, "sleep(600);", UNKNOWN),
    ],
    ids=["first", "second", "beyond the last", "no GPU", "broken driver", "hanging driver"],
)
def test_the_gpu_of_a_server(
    base: int, init: str, expected: Device | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", driver(tmp_path, H200.name, count=2, init=init))
    monkeypatch.setattr(machine, "_SECONDS", 5)
    assert find_gpu(base) == expected


def test_without_a_driver_there_is_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_text("")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    assert find_gpu() is None
