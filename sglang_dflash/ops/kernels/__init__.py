"""One Triton kernel per file, each equal to its definition in :mod:`sglang_dflash.ops.reference`.

Triton compiles a kernel anew for an integer that is 1 or divisible by 16 and for an aligned pointer. Arguments that
change while serving (numbers of tokens, widths, what is a slice) are ``do_not_specialize``, so that nothing is compiled
while requests wait.
"""

from __future__ import annotations

from torch import Tensor


def assert_dense(*vectors: Tensor) -> None:
    """Kernels read one value a row from each of these, and are told of no stride."""
    assert all(vector.is_contiguous() for vector in vectors), [vector.stride() for vector in vectors]


def assert_histories(history: Tensor, found: Tensor) -> None:
    """Kernels step along rows of histories, and know that ``found`` has two columns."""
    assert history.stride(1) == 1 and found.stride() == (2, 1), (history.stride(), found.stride())
