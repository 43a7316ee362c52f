"""``sglang-dflash doctor`` gives a launch's verdict on this environment, and the versions that no test ran with."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from sglang_dflash import __version__
from sglang_dflash.check.doctor import Builtin, Installation
from sglang_dflash.check.machine import GPUS
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch import resolution
from sglang_dflash.launch.device import CPU, Device
from sglang_dflash.upstream import TESTED_SGLANG
from tests.support.preloaded import run

pytestmark = pytest.mark.sglang
pytest.importorskip("sglang")

DOCTOR = ("sglang_dflash.check.cli", "doctor")
PATCHED = "server_args.ServerArgs.from_cli_args"
WITH_A_TABLE = f"""
from sglang_dflash.check.cli import app
from sglang_dflash.upstream.hooks import Hooks, register
register(Hooks(after={{"{PATCHED}": lambda *_: None}}))
app(["doctor", "--json"])
"""


def test_on_the_cpu_platform_our_worker_serves() -> None:
    ended = run("-c", WITH_A_TABLE)
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert (report["problem"], report["worker"]) == (None, "sglang-dflash")
    assert report["device"]["kind"] == "cpu"
    assert report["versions"]["SGLang"] == TESTED_SGLANG
    assert PATCHED in report["patched"]


@pytest.mark.parametrize(
    ("environment", "found", "fix"),
    [
        ({"SGLANG_DFLASH": "builtin"}, "SGLANG_DFLASH=builtin selects SGLang's own worker", "unset SGLANG_DFLASH"),
        ({"SGLANG_PLATFORM": "absent"}, "cannot be imported (RuntimeError: SGLANG_PLATFORM='absent'", "launch_server"),
        ({"SGLANG_PLUGINS": "none", "SGLANG_PLATFORM": "dflash_cpu"}, "did not load the plugin", "SGLANG_PLUGINS"),
    ],
)
def test_what_keeps_dflash_from_our_worker_is_the_first_line_and_its_fix_the_second(
    environment: dict[str, str], found: str, fix: str
) -> None:
    ended = run("-m", *DOCTOR, environment={**os.environ, **environment})
    assert ended.returncode == 1, ended.stderr
    verdict, remedy = ended.stdout.splitlines()[:2]
    assert verdict.startswith(f"sglang-dflash {__version__} does not serve DFLASH here: ") and found in verdict
    assert remedy.startswith("Fix: ") and fix in remedy


H200 = GPUS["h200"]
DRIVER = "install an NVIDIA driver for CUDA 13.0 (CUDA 13: 580 or newer); in a container, pass `--gpus all`"


@pytest.mark.parametrize(
    ("gpu", "cuda", "hip", "torchs_reason", "found", "fix"),
    [
        (None, "13.0", None, "Found no NVIDIA driver. Please check", "a GPU: Found no NVIDIA driver", DRIVER),
        (H200, "13.0", None, "The driver is too old. Please update", "its GPU: The driver is too old", DRIVER),
        (H200, None, None, "Not compiled with CUDA", "its GPU: Not compiled", "a build of torch for this GPU"),
        (None, None, "7.1", "No HIP GPUs are available", "a GPU: No HIP GPUs", "the driver that it needs"),
        (None, None, None, "Not compiled with CUDA", "this machine has no accelerator", "`pip install ./cpu_platform`"),
    ],
    ids=["no driver", "old driver", "torch for CPUs", "ROCm", "no GPU"],
)
def test_a_launch_and_the_doctor_name_what_keeps_torch_from_a_gpu_and_the_cpu_platform_only_without_one(
    gpu: Device | None,
    cuda: str | None,
    hip: str | None,
    torchs_reason: str,
    found: str,
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def init() -> None:
        raise RuntimeError(torchs_reason)

    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(resolution, "_NVIDIA", [Path(__file__)] if gpu else [])
    from sglang.srt.platforms.interface import SRTPlatform

    monkeypatch.setattr(resolution, "current_platform", SRTPlatform())
    with pytest.raises(DFlashError) as refused:
        resolution.refuse_without_accelerator()
    verdict, remedy = list(Installation(gpu or CPU, {}, refused.value).lines())[:2]
    assert found in verdict and fix in remedy
    assert ("cpu_platform" in remedy) == (gpu is None and cuda is None and hip is None)


def test_what_no_test_ran_with_is_named() -> None:
    installed = {"SGLang": TESTED_SGLANG, "torch": "2.13.0+cu130", "Triton": "9.9.9", "FlashInfer": "0.7.2"}
    on_gpu = Installation(GPUS["h100"], installed, None)
    assert on_gpu.untested == ["Triton 9.9.9", "FlashInfer 0.7.2", "NVIDIA H100 80GB HBM3"]
    text = "\n".join(on_gpu.lines())
    assert text.startswith(f"sglang-dflash {__version__} serves DFLASH on NVIDIA H100 80GB HBM3.\nUntested: Triton")
    assert "torch       2.13.0+cu130\n" in text
    on_h200 = {"SGLang": TESTED_SGLANG, "torch": "2.11.0+cu130", "Triton": "3.6.0", "CUDA": "13.0"}
    assert Installation(H200, on_h200, None).untested == [] == Installation(CPU, {"CUDA": "13.9"}, None).untested
    patched = Installation(GPUS["h100"], {}, None, [PATCHED])
    assert [*patched.lines(verbose=True)][-1] == PATCHED and PATCHED not in [*patched.lines()]
    chosen = Builtin("SGLANG_DFLASH=builtin", remedy="unset it")
    assert Installation(GPUS["h100"], {}, chosen).worker == "SGLang's own"
