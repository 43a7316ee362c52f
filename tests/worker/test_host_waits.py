"""The guard that proves a step free of host waits sees every kind of wait, on a CPU as on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from tests.plugin.dflash_test_plugin import host_waits
from tests.plugin.dflash_test_plugin.host_waits import HostSync

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


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_raises(name: str) -> None:
    with torch.inference_mode(), host_waits.debug_mode("error"), pytest.raises(HostSync):  # as a step runs
        WAITS[name]()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_step_is_watched_unless_it_waits_for_the_host(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = ["default"]
    monkeypatch.setattr(host_waits, "EXCUSED", ())
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    info = SimpleNamespace(has_custom_logit_processor=False)
    batch = SimpleNamespace(device=device, has_grammar=False, sampling_info=info)

    def decode(worker: object, batch: object) -> list[int]:
        assert modes[-1] == ("error" if device == "cuda" and not info.has_custom_logit_processor else "default")
        values: list[int] = VALUES.tolist()
        return values

    with pytest.raises(HostSync) if device == "cpu" else nullcontext():
        host_waits.watched(decode, None, batch)
    info.has_custom_logit_processor = True
    assert host_waits.watched(decode, None, batch) == [0, 1, 2, 3] and modes[-1] == "default"
