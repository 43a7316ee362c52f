"""The token of the largest logit in every row, and a faster way to it on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row, the first of equals: [rows, V] to int64 [rows]."""
    if logits.is_cpu and logits.dtype == torch.float32:
        # Torch compares one value at a time, numpy a vector of them.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)
