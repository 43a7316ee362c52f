"""Questions about the device."""

from __future__ import annotations

import torch


def is_arch_support_pdl() -> bool:
    """Whether a kernel may start before the one before it has ended: Hopper and later."""
    return torch.cuda.get_device_capability()[0] >= 9
