"""Attention as its definition says: one query, one head, one key at a time, in fp64."""

from __future__ import annotations

import torch
from torch import Tensor


def loop_attention(q: Tensor, k: Tensor, v: Tensor, allowed: list[list[bool]], scale: float) -> Tensor:
    """``q [T, H, D]`` over ``k, v [C, G, D]`` with ``allowed[t][c]``: one query and head at a time, fp64."""
    out = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64)
    for t in range(q.shape[0]):
        readable = [c for c in range(k.shape[0]) if allowed[t][c]]
        for head in range(q.shape[1]):
            group = head // (q.shape[1] // k.shape[1])
            scores = torch.stack([q[t, head].double() @ k[c, group].double() * scale for c in readable])
            weights = torch.softmax(scores, 0)
            out[t, head] = sum(w * v[c, group].double() for w, c in zip(weights, readable, strict=True))
    return out


def rule(query: int, key: int, *, causal: bool, window: int | None) -> bool:
    """Whether the query at one position may read the key at another."""
    if causal and key > query:
        return False
    return window is None or abs(query - key) <= window
