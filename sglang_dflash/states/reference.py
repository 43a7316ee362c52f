"""The gated delta rule over a block, and the state after a part of it: torch definitions of both operations.

A value head has a state ``S [V, K]``. Token t has a query q, a key k, a value v, a log-decay g <= 0 and a write
strength beta (Yang et al., Gated Delta Networks, 2024):

    S_t = exp(g_t) S_{t-1} + u_t k_t^T        u_t = beta_t (v_t - exp(g_t) S_{t-1} k_t)        o_t = S_t q_t

Unrolled from the state S before the block, with ``D[t, i]`` the decay between the writes of tokens i and t, and ``e_t``
that since the start of the block:

    u_t + beta_t sum_{i<t} D[t, i] (k_t . k_i) u_i = beta_t (v_t - e_t S k_t)      a lower triangular system
    o_t = e_t S q_t + sum_{i<=t} D[t, i] (q_t . k_i) u_i
    S_t = e_t S + sum_{i<=t} D[t, i] u_i k_i^T

Shapes: ``bs`` requests, ``N = bs * width`` tokens, ``H`` key heads, ``HV`` value heads (j reads key head ``j // (HV /
H)``), ``R`` rows of ``L`` recorded tokens. All arithmetic is fp32, and nothing synchronises.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

EPS = 1e-6  # added to a sum of squares
THRESHOLD = 20.0  # from here on softplus(x) = x


class Records(NamedTuple):
    """Records of a block's tokens in SGLang's replay rings: of one layer, or of all with a leading dimension."""

    updates: Tensor  # u, [R, HV, L, V] in the activations' dtype
    keys: Tensor  # k, normalised, [R, H, L, K]
    decays: Tensor  # g, fp32 [R, HV, L]
    updates_low: Tensor | None = None  # rounding remainders in the same 16-bit dtype; None in fp32
    keys_low: Tensor | None = None

    @property
    def parts(self) -> list[Tensor]:
        return [part for part in self if part is not None]

    def assert_alike(self) -> None:
        """Kernels take the strides of the first parts only."""
        for high, low in zip(self.parts, self.parts[3:], strict=False):
            assert low.stride() == high.stride() and low.dtype == high.dtype


class Convolved(NamedTuple):
    """Inputs of the gated delta rule, of N tokens: convolved queries, keys and values, and copies of the gates."""

    mixed: Tensor  # q | k | v, [N, dim]
    z: Tensor  # of the norm after the rule, [N, HV, V]; V is 0 without z
    a: Tensor  # [N, HV]
    b: Tensor  # [N, HV]


def gdn_convolve(
    x: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None, states: Tensor, slots: Tensor,
    windows: Tensor, rows: Tensor, *, width: int, silu: bool = True, recurrent: Tensor | None = None,
) -> Convolved:  # fmt: skip
    """Convolve ``width`` tokens of every request with what came before them, and record the inputs for a commit.

    The states do not change. Outputs of padding (slot < 0) are zero, and its windows do not change.

    Args:
        x: outputs of a projection, ``[N, q | k | v]`` or ``[N, q | k | v | z]``; a, b: ``[N, HV]``. Rows may have gaps.
        weight, bias: ``[dim, taps]`` and ``[dim]`` or None; the last tap is the token's.
        states: last inputs of each slot, of one layer, ``[slots, dim, taps - 1]``; slots: ``[bs]``.
        windows: last inputs after each token, ``[R, L >= width, dim, taps - 1]``; those of consecutive tokens may share
            memory. The first ``bs`` entries of ``rows``, all different, are written.
        recurrent: states ``[slots, HV, V, K]`` that the rule reads next. The kernel fetches them to the L2 cache.
    """
    (dim, taps), bs, HV = weight.shape, len(slots), b.shape[1]
    rows, live = rows[:bs].long(), (slots >= 0).view(-1, 1, 1)
    before = states.index_select(0, slots.clamp(min=0)).mT.to(x.dtype)
    inputs = torch.cat([before, x[:, :dim].unflatten(0, (bs, width))], 1)  # [bs, taps - 1 + width, dim]
    result = torch.zeros(dim, device=x.device) if bias is None else bias.float()
    for tap in range(taps):  # a product is rounded to the dtype of the activations
        result = result + (inputs[:, tap : tap + width] * weight[:, tap]).float()
    if silu:
        result = result / (1 + (-result).exp())
    for t in range(width):
        window, after = windows.select(1, t), inputs[:, t + 1 : t + taps].mT.to(windows.dtype)
        window.index_copy_(0, rows, torch.where(live, after, window.index_select(0, rows)))
    mixed = torch.where(live, result.to(x.dtype), 0).flatten(0, 1)
    return Convolved(mixed, x[:, dim:].reshape(len(x), HV, (x.shape[1] - dim) // HV), a.clone(), b.clone())


def normalized(x: Tensor) -> Tensor:
    return x * x.square().sum(-1, keepdim=True).add_(EPS).rsqrt_()


def log_decay(A_log: Tensor, a: Tensor, dt_bias: Tensor, beta: float = 1.0, threshold: float = THRESHOLD) -> Tensor:
    """Return ``g = -exp(A_log) softplus(a + dt_bias)`` in fp32, the shape of ``a``."""
    step = F.softplus(a.float() + dt_bias.float(), beta, threshold)
    return step.mul_(A_log.float().exp()).neg_()


def decay_between(g: Tensor) -> Tensor:
    """Return ``D[t, i] = exp(g_{i+1} + .. + g_t)`` for i <= t, else 0: ``[..., T]`` to ``[..., T, T]``.

    A difference of two cumulative sums would lose precision after a strong early decay.
    """
    steps = g.shape[-1]
    return g.unsqueeze(-1).expand(*g.shape, steps).tril(-1).cumsum(-2).exp_().tril_()


def gdn_verify(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, states: Tensor,
    slots: Tensor, records: Records, rows: Tensor, *, width: int, scale: float, round_beta: bool = False,
) -> Tensor:  # fmt: skip
    """Run ``width`` tokens of every request and record their writes; the states do not change.

    Padding rows (slot < 0) are written to slot 0 and row 0, which SGLang reserves; the kernel skips them.

    Args:
        q, k: ``[N, H, K]``, not normalised; v: ``[N, HV, V]``. Requests concatenated.
        a, b: inputs of the gates, ``[N, HV]``; A_log, dt_bias: ``[HV]``. ``beta = sigmoid(b)``.
        states: of one layer, ``[slots, HV, V, K]``; slots: ``[bs]``.
        records: of one layer; the first ``width <= L`` positions of ``rows``, ``[bs]``, all different, are written.
        round_beta: whether beta is rounded to the dtype of ``b``.

    Returns:
        Outputs ``[N, HV, V]`` in the dtype of ``q``, zero for padding.
    """
    bs, HV, V = len(slots), v.shape[1], v.shape[2]

    def by_head(x: Tensor) -> Tensor:
        return x.unflatten(0, (bs, width)).transpose(1, 2).float()  # [bs, heads, width, ...]

    queries, keys = normalized(by_head(q)).mul_(scale), normalized(by_head(k))
    g = by_head(log_decay(A_log, a, dt_bias))
    beta = by_head((b if round_beta else b.float()).sigmoid())
    live = slots >= 0
    state = states.index_select(0, slots.clamp(min=0)).float()
    outputs, updates = gdn_block(queries, keys, by_head(v), g, beta, state)

    rows = torch.where(live, rows, 0).long()
    _record(records.updates, records.updates_low, rows, updates)
    _record(records.keys, records.keys_low, rows, keys)
    _record(records.decays, None, rows, g)
    outputs = torch.where(live.view(-1, 1, 1, 1), outputs, 0.0)
    return outputs.transpose(1, 2).reshape(-1, HV, V).to(q.dtype)


def gdn_block(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs o and the writes u of blocks of T tokens, both ``[bs, HV, T, V]``, in the closed form above.

    Args:
        q, k: normalised, the queries scaled, fp32 ``[bs, H, T, K]``; v: ``[bs, HV, T, V]``.
        g, beta: ``[bs, HV, T]``; state: ``[bs, HV, V, K]``.
    """
    bs, H, _, K = k.shape

    def by_group(x: Tensor) -> Tensor:
        return x.unflatten(1, (H, -1))

    decay, decay_in = by_group(decay_between(g)), by_group(g.cumsum(-1).exp_().unsqueeze(-1))
    beta = by_group(beta.unsqueeze(-1))
    both = torch.cat([q, k], -2)
    # the value heads of a key head are rows of one [HV / H * V, K] matrix
    from_state = (both @ state.view(bs, H, -1, K).mT).unflatten(-1, (-1, v.shape[-1])).transpose(2, 3)
    read, erased = (from_state * torch.cat([decay_in, decay_in], -2)).chunk(2, -2)
    scores, overlaps = (x.unsqueeze(2) * decay for x in (both @ k.mT).chunk(2, -2))
    values = (by_group(v) - erased).mul_(beta)
    updates = torch.linalg.solve_triangular(overlaps.mul_(beta), values, upper=False, unitriangular=True)
    return (read + scores @ updates).flatten(1, 2), updates.flatten(1, 2)


def gdn_commit(
    states: Tensor, records: Records, rows: Tensor, slots: Tensor, counts: Tensor, track_slots: Tensor | None = None,
    track_counts: Tensor | None = None,
) -> None:  # fmt: skip
    """Advance every request's state, in all layers, by its first ``counts`` recorded tokens.

    Args:
        states: ``[layers, slots, HV, V, K]``, fp32 or 16-bit, updated in place.
        records: of all layers; positions past a count may hold any value, including NaN.
        rows, slots: ``[bs]``; a request with a negative slot is skipped.
        counts: tokens, ``[bs]``; with <= 0 the state does not change.
        track_slots, track_counts: ``[bs]``; the state after ``track_counts`` tokens is also written to ``track_slots``,
            unless the count is <= 0 or the slot negative. No track slot is one of ``slots``.
    """
    writes = [(slots, counts)]
    if track_slots is not None and track_counts is not None:
        writes.append((track_slots, track_counts))
    targets, counts = (torch.stack(part) for part in zip(*writes, strict=True))  # [1 or 2, bs]
    targets = torch.where((counts > 0) & (slots >= 0), targets, 0).clamp_(min=0).long()

    before = states.index_select(1, slots.clamp(min=0)).float()
    updates = _recorded(records.updates, records.updates_low, rows)
    keys = _recorded(records.keys, records.keys_low, rows)
    decays = records.decays.index_select(1, rows)
    H, steps = keys.shape[2:4]
    recorded = torch.arange(steps, device=counts.device) < counts.unsqueeze(-1)
    # past the largest count: 0 * NaN is NaN
    unread = ~recorded.any(0)[:, None, :, None]
    updates.masked_fill_(unread, 0.0)
    keys.masked_fill_(unread, 0.0)
    recorded = recorded[:, None, :, None]
    # column 0: all decays; column i + 1: those after token i
    weights = (torch.where(recorded, decays, 0.0) @ decays.new_ones(steps, steps + 1).tril_()).exp_()
    of_token = torch.where(recorded, weights[..., 1:], 0.0).unsqueeze(-1)

    for i in reversed(range(len(targets))):
        terms = (updates * of_token[i]).unflatten(2, (H, -1)).transpose(-1, -2).flatten(3, 4)
        after = torch.mul(before, weights[i, ..., :1, None], out=before if i == 0 else None)  # the last one in place
        by_key_head = after.unflatten(2, (H, -1)).flatten(3, 4).flatten(0, 2)  # [layers * bs * H, HV / H * V, K]
        by_key_head.baddbmm_(terms.flatten(0, 2), keys.flatten(0, 2))
        states.index_copy_(1, targets[i], after.to(states.dtype))


def _record(high: Tensor, low: Tensor | None, rows: Tensor, x: Tensor) -> None:
    rounded = x.to(high.dtype)
    high[:, :, : x.shape[2]].index_copy_(0, rows, rounded)
    if low is not None:
        low[:, :, : x.shape[2]].index_copy_(0, rows, (x - rounded.float()).to(low.dtype))


def _recorded(high: Tensor, low: Tensor | None, rows: Tensor) -> Tensor:
    x = high.index_select(1, rows).float()
    return x if low is None else x.add_(low.index_select(1, rows))
