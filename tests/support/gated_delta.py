"""The gated delta rule, token by token: what the CPU platform and the replay are held to."""

from __future__ import annotations

import torch
from torch import Tensor


def normalize(x: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()


def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, dtype: torch.dtype = torch.float64
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
