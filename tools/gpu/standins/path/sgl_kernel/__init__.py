"""Stand-ins for SGLang's compiled kernels, in torch: what a run with Triton attention calls of ``sgl_kernel``.

Every other name can be imported, as SGLang does at its start, and says what it is when it is called. They are slower
than the kernels they stand for; where both workers run on them, a comparison of the two is fair and a speed is not.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Norms: rows of ``weight.numel()`` elements; sums in float32, as the kernels do.


def rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, **_: Any) -> Tensor:
    normed = _norm(input, weight.float(), eps)
    return normed if out is None else out.copy_(normed)


def gemma_rmsnorm(input: Tensor, weight: Tensor, eps: float = 1e-6, out: Tensor | None = None, **_: Any) -> Tensor:
    normed = _norm(input, 1 + weight.float(), eps)
    return normed if out is None else out.copy_(normed)


def fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> None:
    """Overwrites both: ``residual`` with the sum, ``input`` with the sum's norm."""
    _add_and_norm(input, residual, weight.float(), eps)


def gemma_fused_add_rmsnorm(input: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6, **_: Any) -> None:
    _add_and_norm(input, residual, 1 + weight.float(), eps)


def _norm(rows: Tensor, weight: Tensor, eps: float) -> Tensor:
    return functional.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)


def _add_and_norm(rows: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    total = rows.float() + residual.float()
    residual.copy_(total)
    rows.copy_(functional.rms_norm(total, weight.shape, weight, eps))


def silu_and_mul(input: Tensor, out: Tensor | None = None, **_: Any) -> Tensor:
    gate, up = input.chunk(2, dim=-1)
    product = functional.silu(gate.float()).to(input.dtype) * up
    return product if out is None else out.copy_(product)


def top_k_renorm_prob(probs: Tensor, top_k: Tensor | int) -> Tensor:
    """Probabilities of the ``top_k`` largest of each row and of all that tie with the last of them, summing to one."""
    ordered = probs.sort(dim=-1, descending=True).values
    ks = torch.as_tensor(top_k, device=probs.device).expand(len(probs)).long()
    last = ordered.gather(1, (ks.clamp(1, probs.shape[-1]) - 1).unsqueeze(1))
    return _renorm(torch.where(probs >= last, probs, 0.0))


def top_p_renorm_prob(probs: Tensor, top_p: Tensor | float) -> Tensor:
    """Probabilities of the fewest entries of each row that sum to ``top_p`` or more, summing to one."""
    ordered, order = probs.sort(dim=-1, descending=True)
    ps = torch.as_tensor(top_p, device=probs.device, dtype=probs.dtype).expand(len(probs))
    before = ordered.cumsum(dim=-1) - ordered
    kept = torch.where(before < ps.unsqueeze(1), ordered, 0.0)
    return _renorm(torch.zeros_like(probs).scatter(1, order, kept))


def _renorm(probs: Tensor) -> Tensor:
    return probs / probs.sum(dim=-1, keepdim=True)


def weak_ref_tensor(tensor: Tensor) -> Tensor:
    """A strong reference: what a graph keeps of its outputs then lives as long as the graph."""
    return tensor


class Missing:
    """A kernel without a stand-in: harmless to import, an error to call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Missing:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Missing(f"{self._name}.{attribute}")

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} has no stand-in: add one to {__file__}")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``sgl_kernel.anything`` exists and is full of :class:`Missing`."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname.startswith(f"{__name__}.") else None

    def create_module(self, spec: Any) -> None:
        return None

    def exec_module(self, module: Any) -> None:
        module.__getattr__ = lambda name: _missing(module.__name__, name)


def _missing(module: str, name: str) -> Missing:
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{module}.{name}")


def __getattr__(name: str) -> Missing:
    return _missing(__name__, name)


sys.meta_path.append(_Submodules())
