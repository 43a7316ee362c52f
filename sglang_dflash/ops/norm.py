"""RMS norms in torch, in few calls: on a CPU a small model pays for calls, not for arithmetic."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """``1 / sqrt(mean(x**2) + eps)`` over the last dimension of float32 ``x``: ``[..., 1]``."""
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
