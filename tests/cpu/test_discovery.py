"""The CPU platform takes a machine only if it has no accelerator and nothing else was chosen."""

from __future__ import annotations

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu import discovery

NOTHING: dict[str, list[str]] = {"usable": [], "unused": [], "others": []}


@pytest.mark.parametrize("kind", ["CUDA", "ROCm", "XPU", "NPU", "MPS", "MUSA"])
@pytest.mark.parametrize("env", [{}, {"SGLANG_PLATFORM": "dflash_cpu"}, {"SGLANG_USE_CPU_ENGINE": "1"}])
def test_never_takes_a_machine_with_an_accelerator(kind: str, env: dict[str, str]) -> None:
    assert kind in str(discovery.reason_to_stay_out(env, **{**NOTHING, "usable": [kind]}))


@pytest.mark.parametrize(
    ("env", "found", "word"),
    [
        ({"SGLANG_PLATFORM": "kunlun"}, {}, "SGLANG_PLATFORM=kunlun"),
        ({"SGLANG_USE_CPU_ENGINE": "1"}, {}, "SGLANG_USE_CPU_ENGINE"),
        ({}, {"others": ["kunlun"]}, "kunlun"),
        ({}, {"unused": ["CUDA"]}, "cannot use it"),
    ],
)
def test_respects_other_choices_and_a_driver_that_torch_cannot_use(
    env: dict[str, str], found: dict[str, list[str]], word: str
) -> None:
    assert word in str(discovery.reason_to_stay_out(env, **{**NOTHING, **found}))
    assert discovery.reason_to_stay_out({}, **NOTHING) is None


def test_explicit_choice_on_a_gpu_machine_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_PLATFORM", "dflash_cpu")
    monkeypatch.setattr(discovery, "accelerators", lambda: ["CUDA"])
    with pytest.raises(DFlashError, match="SGLANG_PLATFORM=dflash_cpu on a machine with CUDA available"):
        discovery.activate()


def test_a_platform_that_cannot_be_imported_is_not_named_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs what is raised here; the class that it is given it loads unguarded."""
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    for nothing in ("accelerators", "unused_devices", "other_platform_plugins"):
        monkeypatch.setattr(discovery, nothing, list)
    monkeypatch.setattr(discovery, "PLATFORM_CLASS", "sglang_dflash_cpu.no_such_platform.Platform")
    with pytest.raises(ImportError, match="no_such_platform"):
        discovery.activate()


def test_hidden_devices_are_not_a_broken_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery.Path, "exists", lambda self: str(self) == "/dev/nvidiactl")
    assert discovery.unused_devices({}) == ["CUDA"]
    assert discovery.unused_devices({"CUDA_VISIBLE_DEVICES": ""}) == []
    assert discovery.unused_devices({"CUDA_VISIBLE_DEVICES": "0"}) == ["CUDA"]
