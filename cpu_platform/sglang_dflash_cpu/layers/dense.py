"""Products and argmax by the fastest route on this processor."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.ops.dispatch import host_rows

LARGE = 1 << 22  # multiply-adds
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


@cache
def mkl_is_fast() -> bool:
    """Whether MKL is made for this processor."""
    return torch.backends.mkl.is_available() and "Intel" in str(torch.cpu.get_capabilities().get("cpu_name"))


def empty_weight(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """An uninitialised weight ``[outputs, inputs]`` on the CPU, stored so that :func:`linear` is fastest."""
    if dtype == torch.float32 and mkl_is_fast():
        return torch.empty(inputs, outputs, dtype=dtype).t()
    return torch.empty(outputs, inputs, dtype=dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[rows, I]`` (or more leading dimensions) and ``[O, I]`` to ``[rows, O]``.

    Torch sends float32 products to MKL and all others to oneDNN. On Intel processors MKL is the faster one, most of all
    with weights that are stored input by input. On others MKL is slow, but a call of oneDNN takes longer to start, so
    small products stay with torch.
    """
    large = x.dim() == 2 and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= LARGE
    if not (_HAS_ONEDNN and x.is_cpu and large) or mkl_is_fast():
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    spare = host_rows(rows) - rows
    padded = F.pad(x, (0, 0, 0, spare)) if spare else x
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:rows]


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row, the first of equals: [rows, V] to int64 [rows]."""
    if logits.is_cpu and logits.dtype == torch.float32:
        # Torch compares one value at a time, numpy a vector of them.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
