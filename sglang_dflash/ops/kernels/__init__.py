"""Triton kernels, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton recompiles a kernel for an integer that is 1 or divisible by 16, so those that change while serving are
``do_not_specialize``.
"""

from __future__ import annotations

from typing import Any

import triton
from torch import Tensor
from triton.runtime import driver


def assert_dense(*vectors: Tensor | None) -> None:
    """Assert contiguity: kernels index these without strides."""
    given = [vector for vector in vectors if vector is not None]
    assert all(vector.is_contiguous() for vector in given), [vector.stride() for vector in given]


def lanes_of(width: int) -> int:
    return max(32, triton.next_power_of_2(width))


def dependent_launch() -> dict[str, Any]:
    """Return the options of a launch that begins while the kernel before it ends, where SGLang's kernels do so too.

    With ``PDL`` a kernel calls ``gdc_wait`` in every program, before it reads or writes what a forward computes.
    """
    target = driver.active.get_current_target()
    supported = target.backend == "cuda" and target.arch >= 90
    return {"PDL": True, "launch_pdl": True} if supported else {"PDL": False}
