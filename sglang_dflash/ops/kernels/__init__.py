"""Triton kernels, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton compiles a kernel again for an integer that is 1 or divisible by 16, and for an aligned pointer. Arguments that
change while serving (numbers of tokens, widths, slices) are ``do_not_specialize``, so that no request waits for a
compilation.
"""

from __future__ import annotations

from torch import Tensor


def assert_dense(*vectors: Tensor) -> None:
    """Assert contiguity: kernels index these without strides."""
    assert all(vector.is_contiguous() for vector in vectors), [vector.stride() for vector in vectors]
