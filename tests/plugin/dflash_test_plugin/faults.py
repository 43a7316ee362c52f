"""What CUDA refuses, once each: planted into a server by ``overlap``, and called by ``tests/rehearsal``.

Each takes a tensor of the device, one of the host and the device's name; the kind is the beginning of what is reported
(``tests/rehearsal/refusals.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.utils import common
from torch import Tensor

Fault = Callable[[Tensor, Tensor, Any], Any]
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
