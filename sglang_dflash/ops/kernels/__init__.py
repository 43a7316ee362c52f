"""Triton kernels, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton recompiles a kernel for an integer that is 1 or divisible by 16, so those that change while serving are
``do_not_specialize``.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
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


@triton.jit
def fetch(at):
    # A hint: fetch the lines of 128 bytes at these addresses to the L2 cache, before a wait in which DRAM idles, or
    # before loads that would request fewer at once. Kernels do so with PDL: sm_86, without it, has 6 MB of L2.
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )
