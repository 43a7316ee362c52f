"""Every kind of call at which CUDA raises, or makes the host wait, is refused on a CPU; what it takes is not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.utils import common

from sglang_dflash.features import hidden
from tests.rehearsal import streams
from tests.rehearsal.refusals import PLANTED, Refused
from tests.rehearsal.streams import Watch, current_stream, watching
from tests.worker.test_state import OneRequest, decode

pytestmark = pytest.mark.sglang
CUDA = "cpu"  # a name, not the word, at the calls below: there it is the device
# What CUDA refuses, once each: the kind, and a call with tensors of the device and of the host, and the device's name.
Fault = Callable[[torch.Tensor, torch.Tensor, Any], Any]
FAULTS: dict[str, tuple[str, Fault]] = {
    "an array is pinned": ("pin", lambda device, host, name: torch.tensor(host.numpy(), pin_memory=True)),
    "a tensor is pinned": ("pin", lambda device, host, name: torch.tensor(host, pin_memory=True)),
    "memory of the device is pinned": ("pin", lambda device, host, name: device.pin_memory()),
    "operands on both sides": ("operands", lambda device, host, name: device + host),
    "a value on the host": ("operands", lambda device, host, name: (device * 0).index_put_((device * 0,), host)),
    "an index on the host": ("index", lambda device, host, name: device[host[:1] * 0]),
    "a list as an index": ("index", lambda device, host, name: device[[0, 0]]),
    "numpy": ("numpy", lambda device, host, name: device.numpy()),
    "tolist": ("read", lambda device, host, name: device.tolist()),
    "item": ("read", lambda device, host, name: device[0].item()),
    "bool": ("read", lambda device, host, name: bool(device[0])),
    "int": ("read", lambda device, host, name: int(device[0])),
    "numbers of list()": ("read", lambda device, host, name: [float(each) for each in list(device)]),
    "a tensor of its numbers": ("read", lambda device, host, name: torch.tensor([device[0], 1])),
    "a shape from a mask": ("read", lambda device, host, name: device[device > 0]),
    "a blocking copy": ("copy", lambda device, host, name: device.to("cpu")),
    "a blocking copy to the device": ("copy", lambda device, host, name: torch.tensor([1], device=name)),
    "memory that is not pinned": ("pageable", lambda device, host, name: (host + 1).to(name, non_blocking=True)),
    "a copy before its event": ("order", lambda device, host, name: common.async_d2h(device).tolist()),
}


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    monkeypatch.setattr(streams, "_current", streams.DEFAULT)
    monkeypatch.setattr(common, "is_pin_memory_available", lambda device=None: True)
    monkeypatch.setattr(common, "async_d2h", lambda tensor: watch.copy_to_host(tensor))
    watch = Watch(each_operator=False, raises=True)
    with watching(watch):
        yield watch


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_at_its_line(name: str, watched: Watch) -> None:
    kind, fault = FAULTS[name]
    with pytest.raises(Refused) as refused:
        fault(torch.arange(6, device=CUDA), torch.arange(6, device="cpu"), CUDA)
    assert str(refused.value).startswith(f"{kind}: {PLANTED}:")


TAKEN: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "pinned numbers": lambda device, host: common.async_h2d([1, 2], dtype=torch.int64, device=CUDA) + device[:2],
    "numpy numbers in a list": lambda device, host: torch.tensor([np.int64(1)], pin_memory=True),
    "pinned memory": lambda device, host: device.copy_(host.pin_memory(), non_blocking=True),
    "a stack of host tensors": lambda device, host: common.async_h2d_stack([host, host], device=CUDA)[0] + device,
    "a number on the host": lambda device, host: device * torch.tensor(2),
    "an index on the device": lambda device, host: device[device[:2]],
    "a number as an index": lambda device, host: device[2:] + device[1],
    "the host alone": lambda device, host: (host[host].tolist(), int(host.sum()), host.numpy()),
    "a number through a mask": lambda device, host: device.__setitem__(device > 2, 0),
    "a copy after its event": lambda device, host: (
        copied := common.async_d2h(device),
        current_stream().record_event().synchronize(),
        copied.tolist(),
    ),
    "a copy after its stream": lambda device, host: (
        copied := device.to("cpu", non_blocking=True),
        current_stream().synchronize(),
        copied.tolist(),
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_cuda_takes_is_not_refused(name: str, watched: Watch) -> None:
    TAKEN[name](torch.arange(6, device=CUDA), torch.arange(6, device="cpu"))


def test_slots_are_reserved_from_what_can_be_pinned(watched: Watch) -> None:
    """A pool that is long, and one that is short (``_reserve_less``)."""
    assert decode(OneRequest(page=1), [(4, 4)] * 8).allocations
    assert decode(OneRequest(page=1, slots=40), [(4, 4)] * 8).allocations


def test_last_hidden_states_are_chosen_without_a_wait(watched: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row per request. Only SGLang's engine can request them: its HTTP server takes no string here."""
    features = SimpleNamespace(return_hidden_states_mode="last")
    monkeypatch.setattr(hidden, "get_exec", lambda: SimpleNamespace(features=features))
    prefill = SimpleNamespace(is_extend=lambda: True)
    batch = SimpleNamespace(return_hidden_states=True, reqs=[], extend_lens=[2, 3], forward_mode=prefill)
    states = torch.arange(10.0, device=CUDA).view(5, 2)
    chosen = hidden.for_clients(batch, SimpleNamespace(hidden_states=states, last_hidden_states=states))
    assert chosen is not None
    on_host = chosen.to("cpu", non_blocking=True)
    current_stream().synchronize()
    assert on_host.tolist() == [[2, 3], [8, 9]]
