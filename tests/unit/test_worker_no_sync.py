"""The guard that proves a step free of host waits: it must see every kind of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_dflash.worker.no_sync import SWITCH, HostSync, no_autograd, sync_guard

VALUES = torch.arange(4)
MASK = VALUES > 1
WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: VALUES[0].item(),
    "tolist": lambda: VALUES.tolist(),
    "int": lambda: int(VALUES[0]),
    "bool": lambda: bool(MASK[0]),
    "nonzero": lambda: MASK.nonzero(),
    "mask read": lambda: VALUES[MASK],
    "mask write": lambda: VALUES.clone().index_put_((MASK,), torch.tensor(1)),
    "masked_select": lambda: VALUES.masked_select(MASK),
    "where": lambda: torch.where(MASK),
    "argwhere": lambda: torch.argwhere(MASK),
    "float": lambda: float(VALUES[0]),
    "list index": lambda: "abcd"[VALUES[0]],
    "slice": lambda: VALUES[: VALUES[1]],
}


@pytest.mark.parametrize("name", WAITS)
def test_refuses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with no_autograd(), sync_guard("cpu")(), pytest.raises(HostSync):  # as a step runs
        WAITS[name]()


def test_lets_a_step_s_own_operations_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "1")
    with sync_guard("cpu")():
        rows = VALUES[torch.tensor([0, 2])]
        torch.where(MASK, VALUES, 0).scatter_(0, rows, 1).cumsum(0)


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    with sync_guard("cpu")():
        assert VALUES[MASK].tolist() == [2, 3]
