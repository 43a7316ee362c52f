"""A linear layer's matrix product, and its faster route on a CPU.

Torch sends float32 products to MKL, which is slow on AMD processors, and all others to oneDNN, which is not. A call of
oneDNN takes longer to get going, so small products stay with torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

LARGE = 1 << 22  # multiply-adds
_HAS_ONEDNN = torch.backends.mkldnn.is_available()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias``: ``[rows, I]`` (or more leading dimensions) and ``[O, I]`` to ``[rows, O]``."""
    large = x.dim() == 2 and x.dtype == torch.float32 and x.numel() * weight.shape[0] >= LARGE
    if not (_HAS_ONEDNN and x.is_cpu and large):
        return F.linear(x, weight, bias)
    rows = x.shape[0]
    # oneDNN compiles a kernel per number of rows, which takes longer than the product: a prompt's length is rounded up.
    spare = -rows % (16 if rows <= 128 else 64)
    padded = F.pad(x, (0, 0, 0, spare)) if spare else x
    return torch.ops.mkldnn._linear_pointwise(padded, weight, bias, "none", [], "")[:rows]
