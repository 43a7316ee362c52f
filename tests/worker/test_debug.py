"""The guard that proves a step free of host waits sees every kind of wait, on the CPU as on CUDA."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_dflash.errors import DFlashError
from sglang_dflash.worker import debug
from sglang_dflash.worker.debug import SWITCH, sync_guard
from tests.plugin.dflash_test_plugin import host_waits
from tests.plugin.dflash_test_plugin.host_waits import HostSync, HostSyncWarning

VALUES = torch.arange(4)
MASK = VALUES > 1
ROWS = torch.tensor([0, 2])
WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: VALUES[0].item(),
    "tolist": lambda: VALUES.tolist(),
    "bool": lambda: bool(MASK[0]),
    "nonzero": lambda: MASK.nonzero(),
    "mask read": lambda: VALUES[MASK],
    "mask write": lambda: VALUES.clone().index_put_((MASK,), ROWS),
    "unique": lambda: VALUES.unique(),
    "repeat_interleave": lambda: VALUES.repeat_interleave(VALUES),
    "equal": lambda: torch.equal(VALUES, VALUES.clone()),
}


@pytest.fixture(autouse=True)
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(debug.MODES, "cpu", host_waits.debug_mode)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_raises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "2")
    with torch.inference_mode(), sync_guard("cpu")(), pytest.raises(HostSync):  # as a step runs
        WAITS[name]()


def test_a_wait_warns_and_the_step_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first compilation waits too, so 1 must not end a healthy server."""
    monkeypatch.setenv(SWITCH, "1")
    with torch.inference_mode(), sync_guard("cpu")(), pytest.warns(HostSyncWarning, match="tolist"):
        assert VALUES.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("value", "device"), [("1", "xpu"), ("yes", "cpu")])
def test_other_values_and_devices_are_refused(value: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, value)
    with pytest.raises(DFlashError, match=f"{SWITCH}='{value}' on a device of type {device}"):
        sync_guard(device)


@pytest.mark.parametrize("switch, mode", [("1", "warn"), ("2", "error")])
def test_the_debug_mode_of_cuda_is_set_and_comes_back(switch: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setenv(SWITCH, switch)
    with pytest.raises(ValueError), sync_guard("cuda")():
        assert modes[-1] == mode
        raise ValueError
    assert modes[-1] == "default"
