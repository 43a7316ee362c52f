"""This machine's GPU: by nvidia-smi, or by torch where that program is missing or has no answer."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from sglang_dflash.plan import machine
from sglang_dflash.plan.machine import GPUS, MIB, Machine, find_gpu

H200 = "NVIDIA H200, {}, 9.0, GPU-4b1, Disabled"
A10 = "NVIDIA A10, 23028, 8.6, GPU-07c, Disabled"
TORCH = """
from types import SimpleNamespace
properties = SimpleNamespace(name="NVIDIA H200", total_memory=143771 << 20, major=9, minor=0)
cuda = SimpleNamespace(device_count=lambda: {count}, get_device_properties=lambda index: properties)
"""


@pytest.mark.parametrize(
    ("program", "has_gpu", "memory", "source"),
    [
        (H200.format(143771), False, 143771, "nvidia-smi"),
        (None, True, 143771, "torch"),
        (H200.format("[N/A]"), True, 143771, "torch"),
        ("exit 9", True, 143771, "torch"),
        (H200.format("[N/A]"), False, None, "torch"),
        (None, False, None, None),
    ],
    ids=["nvidia-smi", "no nvidia-smi", "it has no answer", "it fails", "nobody knows", "no GPU"],
)
def test_the_gpus_memory_is_source_one_of_two(
    program: str | None,
    has_gpu: bool,
    memory: int | None,
    source: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both are asked in processes of their own; this one loads no torch for it."""
    write_programs(
        tmp_path, None if program is None else program if "exit" in program else f"echo {program!r}", count=has_gpu
    )
    install(tmp_path, monkeypatch)
    found = find_gpu()
    if source is None:
        assert found is None
    else:
        expected = GPUS["h200"].memory if memory else None
        assert found == Machine("gpu", "NVIDIA H200", expected, (9, 0), source)  # type: ignore[arg-type]
        assert memory is None or found.memory == memory * MIB
    assert "torch" not in sys.modules or sys.modules["torch"].__file__ != str(tmp_path / "torch.py")


def write_programs(folder: Path, script: str | None, *, count: int) -> None:
    """``nvidia-smi`` and a torch that finds ``count`` GPUs."""
    if script is not None:
        program = folder / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (folder / "torch.py").write_text(TORCH.format(count=count))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    monkeypatch.setattr(machine, "_DRIVER", folder)
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"PATH": str(folder), "PYTHONPATH": str(folder), **environment}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("environment", "base", "of_torch", "name", "source"),
    [
        ({"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, 0, "NVIDIA H200", "nvidia-smi"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1, 0, "NVIDIA H200", "nvidia-smi"),
        ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 1, 0, "NVIDIA H200", "nvidia-smi"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-4b1"}, 0, 0, "NVIDIA H200", "nvidia-smi"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-07c"}, 0, 0, "NVIDIA A10", "nvidia-smi"),
        ({}, 0, 2, "NVIDIA H200", "torch"),  # CUDA counts the fastest first
        ({"CUDA_VISIBLE_DEVICES": "MIG-5e0"}, 0, 1, "NVIDIA H200", "torch"),
        ({}, 0, 0, "an unknown GPU", "torch"),  # and not the first line's A10
    ],
    ids=["index", "base", "base alone", "UUID", "first UUID", "order", "MIG", "no answer"],
)
def test_the_gpu_is_the_one_that_this_process_will_use(
    environment: dict[str, str],
    base: int,
    of_torch: int,
    name: str,
    source: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_programs(tmp_path, f"echo {A10!r}\necho {H200.format(143771)!r}", count=of_torch)
    install(tmp_path, monkeypatch, **environment)
    found = find_gpu(base)
    assert found is not None and (found.name, found.source) == (name, source)


def test_alike_gpus_need_no_order_and_a_split_one_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = H200.format(143771)
    write_programs(tmp_path, f"echo {whole!r}\necho {whole!r}", count=0)
    install(tmp_path, monkeypatch, CUDA_VISIBLE_DEVICES="1")
    found = find_gpu()
    assert found is not None and found.source == "nvidia-smi"
    split = whole.replace("Disabled", "Enabled").replace("143771", "71000")
    write_programs(tmp_path, f"echo {split!r}", count=1)
    install(tmp_path, monkeypatch)
    found = find_gpu()
    assert found is not None and (found.source, found.memory) == ("torch", 143771 * MIB)


def test_a_hanging_nvidia_smi_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_programs(tmp_path, "exec /bin/sleep 600", count=1)
    install(tmp_path, monkeypatch)
    monkeypatch.setattr(machine, "_SECONDS", 3)
    found = find_gpu()
    assert found is not None and found.source == "torch"


@pytest.mark.sglang
@pytest.mark.parametrize(
    ("told", "line"),
    [
        (Machine("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), "nvidia-smi"), None),
        (Machine("gpu", "NVIDIA H200", 143771 * MIB, (9, 0), "torch"), "torch reports 140.40 GiB for NVIDIA H200"),
        (
            Machine("gpu", "NVIDIA GB10", None, (12, 1), "torch"),
            "could not read the memory of NVIDIA GB10 from nvidia-smi or torch",
        ),
        (None, "recurrent states are kept"),
    ],
)
def test_a_launch_says_which_answer_it_goes_by(
    told: Machine | None, line: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launch = pytest.importorskip("sglang") and pytest.importorskip("sglang_dflash.hooks.launch")
    monkeypatch.setattr(launch, "on_our_cpu_platform", lambda: False)
    monkeypatch.setattr(launch, "find_gpu", lambda _: told)
    launch.this_machine.__wrapped__(0)
    assert (line in caplog.text) if line else not caplog.records
