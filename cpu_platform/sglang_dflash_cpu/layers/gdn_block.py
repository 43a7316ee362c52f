"""The gated delta rule over a block of tokens in closed form: no loop over tokens.

One head keeps a state ``S [V, K]``. Token t brings a query q, key k, value v, log-decay g <= 0 and write
strength beta:

    S_t = exp(g_t) S_{t-1} + u_t k_t^T        u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)        o_t = S_t q_t

(Yang et al., Gated Delta Networks, 2024). Unrolled from the state S before the block, with ``D[t, i]`` the
decay between the writes of tokens i and t, and ``e_t`` the decay since the start of the block:

    u_t + beta_t sum_{i<t} D[t, i] (k_t . k_i) u_i = beta_t (v_t - e_t S k_t)      a lower triangular system
    o_t = e_t S q_t + sum_{i<=t} D[t, i] (q_t . k_i) u_i
    S_t = e_t S + sum_{i<=t} D[t, i] u_i k_i^T

Shapes: q, k ``[..., T, K]``; v ``[..., T, V]``; g, beta ``[..., T]``; states ``[..., V, K]``. All are
fp32, and the queries are scaled already.

A verify keeps u, k, D and e of each position for the commit (:func:`keep`), ``V + K + block + 1`` numbers in SGLang's
room for a whole state: the commit adds up the one state that it needs. To store them all cost more than the rest of the
verify.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor


def pairwise_decay(g: Tensor) -> Tensor:
    """``D[t, i] = exp(g_{i+1} + .. + g_t)`` for i <= t, else 0: ``[..., T, T]``.

    Each sum is formed on its own. The difference of two cumulative sums would lose precision after a strong decay
    early in the block.
    """
    steps = g.shape[-1]
    return g.unsqueeze(-1).expand(*g.shape, steps).tril(-1).cumsum(-2).exp_().tril_()


@dataclass(frozen=True)
class Block:
    """Terms of a block that do not depend on the state before it; every field may have leading dimensions."""

    queries_keys: Tensor  # [2T, K]  e_t q_t, then beta_t e_t k_t
    system: Tensor  # [T, T]  beta_t D[t, i] (k_t . k_i); only i < t is read
    scores: Tensor  # [T, T]  D[t, i] (q_t . k_i)
    values: Tensor  # [T, V]  beta_t v_t
    keys: Tensor  # [T, K]
    decay: Tensor  # [T, T]  D
    decay_in: Tensor  # [T, 1]  e

    def rows(self, rows: slice) -> Block:
        """The blocks ``rows`` of the first leading dimension."""
        return Block(*(getattr(self, field.name)[rows] for field in fields(self)))


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Block:
    """Terms of the closed form, for any number of blocks at once (leading dimensions)."""
    decay = pairwise_decay(g)
    decay_in = g.cumsum(-1).exp_().unsqueeze(-1)
    beta = beta.unsqueeze(-1)
    return Block(
        queries_keys=torch.cat([q * decay_in, k * (beta * decay_in)], -2),
        system=(k @ k.mT).mul_(decay).mul_(beta),
        scores=(q @ k.mT).mul_(decay),
        values=v * beta,
        keys=k,
        decay=decay,
        decay_in=decay_in,
    )


def apply(block: Block, state: Tensor) -> tuple[Tensor, Tensor]:
    """Run a block from ``state [..., V, K]``: the outputs o and the writes u, both ``[..., T, V]``."""
    from_state, erased = (block.queries_keys @ state.mT).chunk(2, -2)
    writes = torch.linalg.solve_triangular(block.system, block.values - erased, upper=False, unitriangular=True)
    return from_state + block.scores @ writes, writes


def last_state(block: Block, state: Tensor, writes: Tensor) -> Tensor:
    """State after the block, ``[..., V, K]``."""
    decay_out = block.decay[..., -1, :].unsqueeze(-1)
    return block.decay_in[..., -1:, :] * state + writes.mT @ (block.keys * decay_out)


def _words(buffer: Tensor) -> Tensor:
    """``[..., block, HV, V, K]`` of any dtype as fp32 ``[..., HV, block, words]``: the same memory."""
    block, heads = buffer.shape[-4:-2]
    return buffer.flatten(-4).view(torch.float32).unflatten(-1, (heads, block, -1))


def keep(buffer: Tensor, rows: Tensor, block: Block, writes: Tensor) -> None:
    """Record the block of T tokens of every request.

    Args:
        buffer: ``[rows, block >= T, HV, V, K]`` of one layer.
        rows: row of each request in it, int64 ``[bs]``.
        block: leading dimensions ``[bs, HV]``.
        writes: u, ``[bs, HV, T, V]``.
    """
    spare = buffer.shape[1] - writes.shape[-2]
    # Positions that this block lacks weigh zero, but 0 * NaN is NaN: their rows are overwritten with zeros too.
    decay = F.pad(block.decay, (0, spare)) if spare else block.decay
    records = torch.cat([writes, block.keys, decay, block.decay_in], -1)
    words = _words(buffer)[..., : records.shape[-1]]
    words.index_copy_(0, rows, F.pad(records, (0, 0, 0, spare)) if spare else records)


class Records:
    """The blocks of some requests in all layers.

    Args:
        buffer: ``[layers, rows, block, HV, V, K]``, as :func:`keep` left it.
        rows: row of each request in it, int64 ``[bs]``.
        before: states before the block, fp32 ``[layers, bs, HV, V, K]``.
    """

    def __init__(self, buffer: Tensor, rows: Tensor, before: Tensor) -> None:
        widths = [*before.shape[-2:], buffer.shape[2] + 1]
        records = _words(buffer)[..., : sum(widths)].index_select(1, rows)
        self._writes, self._keys, self._decays = records.split(widths, -1)
        self._before = before

    def state_after(self, positions: Tensor) -> Tensor:
        """State of each request after one position of its block, ``positions [bs]``: the shape of ``before``."""
        rows = positions.view(1, -1, 1, 1, 1).expand(*self._decays.shape[:3], 1, self._decays.shape[-1])
        decay = self._decays.gather(3, rows).mT  # [layers, bs, HV, block + 1, 1]
        states = self._before * decay[..., -1:, :]
        writes, keys = (self._writes * decay[..., :-1, :]).flatten(0, 2), self._keys.flatten(0, 2)
        states.flatten(0, 2).baddbmm_(writes.mT, keys)
        return states
