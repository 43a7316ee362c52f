"""Triton kernels, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton recompiles a kernel for an integer that is 1 or divisible by 16, so those that change while serving are
``do_not_specialize``.
"""

from __future__ import annotations

import triton
from torch import Tensor


def assert_dense(*vectors: Tensor | None) -> None:
    """Assert contiguity: kernels index these without strides."""
    given = [vector for vector in vectors if vector is not None]
    assert all(vector.is_contiguous() for vector in given), [vector.stride() for vector in given]


def lanes_of(width: int) -> int:
    return max(32, triton.next_power_of_2(width))
