"""Torch stand-ins for the kernels of ``sgl_kernel`` that a run with Triton attention calls, if the packed ones fail.

Any other name can be imported, as SGLang does at start-up, and raises with its name when called.
"""

from __future__ import annotations

import sys
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.support.probability import top_k_renorm_prob as top_k_renorm_prob
from tests.support.probability import top_p_renorm_prob as top_p_renorm_prob


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, **_: Any) -> Tensor:
    """Return the RMS norm of rows of ``weight.numel()`` elements, with sums in float32 as in the kernel."""
    normed = functional.rms_norm(input.float(), weight.shape, weight.float(), eps).to(input.dtype)
    return normed if out is None else out.copy_(normed)


def gemma_rmsnorm(input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    return rmsnorm(input, 1 + weight.float(), *args, **options)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> None:
    """Overwrite ``residual`` with the sum and ``input`` with the sum's norm."""
    total = input.float() + residual.float()
    residual.copy_(total)
    rmsnorm(total, weight, eps, out=input)


def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, *args: Any, **options: Any) -> None:
    fused_add_rmsnorm(input, residual, 1 + weight.float(), *args, **options)


def silu_and_mul(input: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    product = functional.silu(gate.float()).to(input.dtype) * up
    return product if out is None else out.copy_(product)


def moe_sum_reduce(input: Tensor, output: Tensor, factor: float) -> None:
    """Write the sum of each token's experts, ``input[:, expert]``, times ``factor`` to ``output``."""
    output.copy_(input.sum(1, dtype=torch.float32) * factor)


def moe_align_block_size(topk_ids: Tensor, buckets: int, block: int, *outputs: Any) -> None:
    """Sort the tokens' experts into buckets, each padded to whole blocks; bucket 0 is of expert -1.

    The first rows of a capture are uninitialised: an invalid id is counted with the last expert.

    Args:
        topk_ids: ``[tokens, k]``, experts of each token.
        buckets: experts and one more.
        outputs: the index into ``topk_ids`` at each place, its number of elements in padding; the expert of each block;
            the number of places; further arguments are unused.
    """
    sorted_ids, expert_ids, padded_tokens, *_ = outputs
    bucket = (topk_ids.flatten().long() + 1).clamp(0, buckets - 1)
    counts = bucket.new_zeros(buckets).scatter_add_(0, bucket, torch.ones_like(bucket))
    ends = ((counts + block - 1) // block * block).cumsum(0)
    order = bucket.argsort(stable=True)
    ranked = bucket[order]
    rank = torch.arange(len(bucket), device=bucket.device) - (counts.cumsum(0) - counts)[ranked]
    before = ends - (counts + block - 1) // block * block
    sorted_ids.fill_(len(bucket)).index_copy_(0, before[ranked] + rank, order.to(sorted_ids.dtype))
    blocks = torch.arange(len(expert_ids), device=bucket.device) * block
    expert_ids.copy_(torch.searchsorted(ends, blocks, right=True).clamp(max=buckets - 1) - 1)
    padded_tokens[:1].copy_(ends[-1:])


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """A strong reference: what a graph keeps of its outputs then lives as long as the graph."""
    return tensor


class Missing:
    """A kernel without a stand-in. It can be imported; calling it raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in. Fix: add one to {__file__}")


def _missing(module: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{module}.{name}")


__getattr__ = partial(_missing, __name__)
for _name in ("allreduce", "kvcacheio", "quantization", "scalar_type", "utils"):
    _module: Any = ModuleType(f"{__name__}.{_name}")
    _module.__getattr__ = partial(_missing, _module.__name__)
    globals()[_name] = sys.modules[_module.__name__] = _module
# Whether a kernel may start before the previous one has ended (Hopper and later).
utils.is_arch_support_pdl = lambda: torch.cuda.get_device_capability()[0] >= 9  # noqa: F821
