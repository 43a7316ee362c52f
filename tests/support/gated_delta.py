"""The gated delta rule and the causal convolution, token by token: what the CPU platform is held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


def normalize(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """One sequence: q, k ``[T, H, K]``, v ``[T, HV, V]``, g, beta ``[T, HV]``, state ``[HV, V, K]``.

    Queries and keys are normalized here, and queries scaled by ``K ** -0.5``. Returns outputs ``[T, HV, V]`` and
    states ``[T, HV, V, K]``.
    """
    q, k, v, g, beta, state = (x.to(dtype) for x in (q, k, v, g, beta, state))
    repeats = v.shape[1] // k.shape[1]
    q = normalize(q).repeat_interleave(repeats, 1) * q.shape[-1] ** -0.5
    k = normalize(k).repeat_interleave(repeats, 1)
    outputs, states = [], []
    for t in range(len(v)):
        after = (states[-1] if states else state) * g[t].exp()[:, None, None]
        write = (v[t] - (after * k[t][:, None]).sum(-1)) * beta[t][:, None]
        after = after + write[:, :, None] * k[t][:, None]
        outputs.append((after * q[t][:, None]).sum(-1))
        states.append(after)
    return torch.stack(outputs), torch.stack(states)


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, history: Tensor) -> tuple[Tensor, Tensor]:
    """One sequence, x ``[dim, T]``, history ``[dim, W]``: outputs ``[dim, T]`` and windows ``[T, dim, W]``."""
    x, weight, row = x.double(), weight.double(), history.double()
    outputs, windows = [], []
    for t in range(x.shape[1]):
        row = torch.cat([row, x[:, t : t + 1]], 1)
        y = (row[:, -weight.shape[1] :] * weight).sum(1)
        outputs.append(y if bias is None else y + bias.double())
        windows.append(row[:, 1 - weight.shape[1] :])
    return torch.stack(outputs, 1), torch.stack(windows)


class _NoSyncOperator(TorchDispatchMode):
    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select")
    INDEXING = ("index", "index_put", "index_put_")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert name not in self.FORBIDDEN, f"aten::{name} waits for a value"
        if name in self.INDEXING:
            masks = [index for index in args[1] if index is not None and index.dtype == torch.bool]
            assert not masks, f"aten::{name} by a mask waits for its count"
        return func(*args, **(kwargs or {}))


class _NoCopyToHost(TorchFunctionMode):
    """What reads a CPU tensor's memory without an operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (Tensor.tolist, Tensor.numpy), f"{func.__name__} waits for values"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Fail on whatever needs a tensor's values on the host: on a GPU it would stall a speculative step.

    Not to be used under ``inference_mode``, which hides what an operator is made of.
    """
    with _NoSyncOperator(), _NoCopyToHost():
        yield
