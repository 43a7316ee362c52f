"""``pin_memory`` and ``record_stream`` are harmless if the CPU platform is active."""

from __future__ import annotations

import pytest
import torch

from sglang_dflash.cpu import torch_stubs


def test_host_tensors_pass_through(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pin_memory", "record_stream"):  # restored after the test
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    torch_stubs.install()
    tensor = torch.arange(3)
    assert tensor.pin_memory() is tensor
    tensor.record_stream(torch.cpu.current_stream())
