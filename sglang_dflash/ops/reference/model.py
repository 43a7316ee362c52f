"""Definitions inside the drafter's forward: norm and RoPE, attention, DFlash2's convolution, products, and drafts."""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.ops.reference.sampling import filter_probs, seeded_draw

UNSURE = 0.4  # of the likeliest draft's probability; docs/measured.md#thresholds
GREEDY_VALUES = 2  # a greedy request's draft and the lead over the next


class Noise(NamedTuple):
    """How the target draws the tokens of each request: seeds int64, temperatures float32, top-k int32, top-p and min-p
    float32, each [bs]. A greedy request has top-k 1."""

    seeds: Tensor
    temperatures: Tensor
    top_ks: Tensor
    top_ps: Tensor
    min_ps: Tensor


Codebooks = tuple[Tensor, Tensor, Tensor]


def norm_rope(
    heads: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, *, neox: bool = True
) -> Tensor:
    """RMS-normalise and rotate attention heads, in float32; last dimensions are dense.

    Args:
        heads: [L, T, heads, head_dim].
        norm_weight: [L, heads, head_dim].
        positions: int64 [T], absolute.
        cos_sin: [max_position, rotary_dim], cosines, then sines.
        neox: rotate halves (True) or interleaved pairs (False) of the first ``rotary_dim`` entries.

    Returns:
        [L, T, heads, head_dim], dense, in the dtype of ``heads``.
    """
    wide = heads.float()
    wide = (wide * inverse_rms(wide, eps)).mul_(norm_weight[:, None])
    cos, sin = cos_sin.index_select(0, positions).float()[:, None].chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[1]
    rotated = wide[..., :rotary_dim]
    first, second = rotated.chunk(2, dim=-1) if neox else (rotated[..., 0::2], rotated[..., 1::2])
    parts = [torch.addcmul(first * cos, second, sin, value=-1), torch.addcmul(second * cos, first, sin)]
    if not neox:
        parts = [torch.stack(parts, dim=-1).flatten(-2)]
    if rotary_dim < heads.shape[-1]:
        parts.append(wide[..., rotary_dim:])
    return torch.cat(parts, dim=-1).to(heads.dtype)


def block_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, rows: Tensor, lengths: Tensor, *, scale: float,
    causal: bool = False, window: int = -1, cap: float = 0.0, sinks: Tensor | None = None, k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """Attend from blocks of ``w`` tokens to the context and the block of each request.

    Args:
        q: [bs * w, H, D], D a power of two; the last dimension is dense, here and in ``keys`` and ``values``.
        keys, values: K/V pool [slots, KV, D], 16-bit, float32 or fp8; they hold the block too.
        table: int32 [requests, C], a request's slots by position; slot 0 from C on.
        rows, lengths: int [bs], row of the table, and tokens before the block.
        causal: whether a position sees only positions up to itself.
        window: positions before a query that it sees; -1 for all.
        cap: soft cap of the scores, ``cap * tanh(score / cap)``; 0 for none.
        sinks: [H], score of a key without a value.
        k_scale, v_scale: factors of the stored K and V.

    Returns:
        [bs * w, H, D], dense, in the dtype of ``q``; computed in float32 or wider.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    width, group = len(q) // max(1, len(rows)), q.shape[1] // keys.shape[1]
    out, block = torch.empty_like(q, memory_format=torch.contiguous_format), torch.arange(width, device=q.device)
    for i, (row, length) in enumerate(zip(rows.tolist(), lengths.tolist(), strict=True)):
        slots = F.pad(table[row, : length + width].long(), (0, max(0, length + width - table.shape[1])))
        k, v = (pool[slots].to(wide).repeat_interleave(group, 1) for pool in (keys, values))
        each = slice(i * width, (i + 1) * width)
        score = torch.einsum("qhd,khd->hqk", q[each].to(wide), k) * (scale * k_scale)
        if cap:
            score = cap * torch.tanh(score / cap)
        ahead = torch.arange(length + width, device=q.device) - (length + block)[:, None]
        hidden = (ahead > 0 if causal else ahead > width) | (ahead < -window if window >= 0 else ahead > width)
        score = score.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            score = torch.cat([score, sinks.to(wide)[:, None, None].expand(-1, width, 1)], 2)
        weight = score.softmax(2)[:, :, : length + width]
        out[each] = (torch.einsum("hqk,khd->qhd", weight, v) * v_scale).to(q.dtype)
    return out


def convolve_block(hidden: Tensor, base: Tensor, corrections: Tensor, *, width: int) -> Tensor:
    """Convolve the positions of each block: ``out[i] = sum over t of (base[t] + corrections[i, t]) * hidden[i - t]``.

    Positions before the block count as zeros.

    Args:
        hidden: [bs * w, H].
        base: [taps, H].
        corrections: [bs * w, taps, G], one per group of ``H / G`` adjacent channels; the last dimension is dense.

    Returns:
        [bs * w, H], dense, in the dtype of ``hidden``; computed in float32.
    """
    taps, groups = corrections.shape[1:]
    blocks = hidden.float().view(-1, width, groups, hidden.shape[1] // groups)
    kernel = corrections.float().unflatten(0, (-1, width))[..., None] + base.float().view(taps, groups, -1)
    out = kernel[:, :, 0] * blocks
    for tap in range(1, min(taps, width)):
        out[:, tap:] += kernel[:, tap:, tap] * blocks[:, :-tap]
    return out.view(hidden.shape).to(hidden.dtype)


def leading_tokens(logits: Tensor, k: int, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row, descending (NaN above all), and their indices, the first of equals
    first: [rows, V] to float32 and int64 [rows, k].

    Args:
        noise: of requests, of which each has equally many rows in a row. For a greedy one only the
            first ``GREEDY_VALUES`` are searched: the others are minus infinity and 0.
    """
    equal_nans = logits.float().masked_fill(logits.isnan(), torch.nan)  # CUDA sorts NaN by sign
    values, tokens = (each[:, :k] for each in equal_nans.sort(dim=-1, descending=True, stable=True))
    if noise is None:
        return values, tokens
    greedy = (noise.top_ks == 1).repeat_interleave(len(logits) // max(1, len(noise.top_ks)))[:, None]
    skipped = greedy & (torch.arange(k, device=logits.device) >= GREEDY_VALUES)
    return values.masked_fill(skipped, -torch.inf), tokens.masked_fill(skipped, 0)


def likeliest_tokens(logits: Tensor, k: int, positions: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """Return the tokens and leads of :func:`walk_candidates` among the ``k`` largest logits, [bs, n, V]."""
    shape = (*logits.shape[:2], k)
    values, tokens = leading_tokens(logits.flatten(0, 1), k, noise)
    return walk_candidates(tokens.view(shape), values.view(shape), positions, positions, noise)


def walk_candidates(
    candidates: Tensor, unary: Tensor, anchors: Tensor, positions: Tensor, noise: Noise | None = None,
    codebooks: Codebooks | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Choose a token per position, from left to right, by the candidates' scores.

    The score of candidate c after token p is ``unary[c] + sum over r of predecessors[p, r] * gates[r] * successors[c,
    r]``, in float32; without ``codebooks``, ``unary[c]``. :func:`choose_candidate` chooses by the scores.

    Args:
        candidates, unary: int64 and float32 [bs, n, K], distinct at each position.
        anchors, positions: int64 [bs], the token before the first position, and where it is in its sequence.
        noise: None chooses the best candidates only.
        codebooks: gates [bs, n, R], predecessors and successors [V, R].

    Returns:
        int64 [bs, n], the tokens (the first of equals), and float32 [bs, n], the leads of the best over the second,
            which may be infinite.
    """
    bs, n, k = candidates.shape
    places = positions[:, None] + torch.arange(n, device=positions.device)
    if codebooks is None:
        repeated = noise and Noise(*(each.repeat_interleave(n) for each in noise))
        tokens, leads = choose_candidate(candidates.view(-1, k), unary.view(-1, k), repeated, places.flatten())
        return tokens.view(bs, n), leads.view(bs, n)
    (gates, predecessors, successors), last, chosen = codebooks, anchors, []
    for i in range(n):
        key = predecessors[last].float() * gates[:, i].float()
        scores = unary[:, i] + (successors[candidates[:, i]].float() @ key[:, :, None]).squeeze(2)
        chosen.append(choose_candidate(candidates[:, i], scores, noise, places[:, i]))
        last = chosen[-1][0]
    tokens, leads = (torch.stack(each, 1) for each in zip(*chosen, strict=True))
    return tokens, leads


def choose_candidate(ids: Tensor, scores: Tensor, noise: Noise | None, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Choose a candidate per row, ``ids`` and ``scores`` [rows, K]: its token [rows], and the best one's lead [rows].

    Take the best. If its probability is below ``UNSURE`` and the request samples, take the target's draw at
    ``positions`` [rows] from these scores (:func:`~sglang_dflash.ops.reference.sampling.seeded_tokens`).
    """
    best = scores.argmax(1, keepdim=True)
    first = scores.gather(1, best)
    leads = (first - scores.scatter(1, best, -torch.inf).amax(1, keepdim=True)).squeeze(1)
    if noise is not None:
        weights = filter_probs(torch.softmax(scores / noise.temperatures[:, None], 1), *noise[2:])
        drawn = seeded_draw(weights, noise.seeds, positions, ids)
        unsure = (torch.softmax(scores, 1).amax(1) < UNSURE) & (noise.top_ks != 1)
        best = torch.where(unsure[:, None], drawn[:, None], best)
    return ids.gather(1, best).squeeze(1), leads


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., I]`` and ``[O, I]`` to ``[..., O]``."""
    return F.linear(x, weight, bias)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return ``1 / sqrt(mean(x**2) + eps)`` over the last dimension of float32 ``x``: ``[..., 1]``."""
    # few ops: small models on a CPU are bound by dispatch
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
