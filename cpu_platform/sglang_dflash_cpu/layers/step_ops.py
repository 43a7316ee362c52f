"""Operations of a decode step in numpy, whose calls are faster than torch's; small models are bound by dispatch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sglang_dflash.ops import Noise, token_hash
from sglang_dflash.ops.reference import model
from sglang_dflash.ops.reference.model import Codebooks


def match_copies(
    history: Tensor,
    found: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    tokens: Tensor,
    last: Tensor,
    *,
    longest: int,
    bound: int,
) -> None:
    """As :func:`sglang_dflash.ops.reference.step.match_copies`, from the occurrences of the newest token."""
    places, newest = rows.numpy(), last.numpy().astype(np.int64)[:, None]
    positions = np.minimum(seq_lens.numpy()[:, None] + np.arange(1, tokens.shape[1] + 1), history.shape[1] - 1)
    history.numpy()[places[:, None], positions] = tokens.numpy()
    known, back = history.numpy()[places, : min(bound, history.shape[1] - 1) + 1], np.arange(longest)
    wanted = np.where(newest >= back, np.take_along_axis(known, np.maximum(newest - back, 0), 1), -1)
    occurs = (known == wanted[:, :1]) & (np.arange(known.shape[1]) < newest) & (wanted[:, :1] >= 0)
    request, ends = np.nonzero(occurs)
    positions, wanted = ends[:, None] - back, wanted[request]
    differs = (known[request[:, None], positions] != wanted) | (positions < 0) | (wanted < 0)
    lengths = np.where(differs.any(1), differs.argmax(1), longest)
    keys = np.zeros(len(places), dtype=np.int64)
    np.maximum.at(keys, request, (lengths << 31) + ends)
    found.numpy()[places, 0] = (newest[:, 0] << 36) + keys


def take_copies(
    tokens: Tensor,
    margins: Tensor,
    history: Tensor,
    found: Tensor,
    rows: Tensor,
    last: Tensor,
    *,
    least: int,
    margin: float,
) -> None:
    """As :func:`sglang_dflash.ops.reference.step.take_copies`; most steps have no match."""
    places, (keys, starts) = rows.numpy(), found.numpy().T
    length, end = (keys[places] >> 31) & 31, keys[places] & 0x7FFFFFFF
    starts[places] = 0
    matched = np.flatnonzero(length >= least)
    if not len(matched):
        return
    places, end, drafts = places[matched], end[matched, None], tokens.numpy()[matched, 1:]
    ahead = np.arange(drafts.shape[1]) % np.maximum(last.numpy()[matched, None] - end, 1)
    copies = history.numpy()[places[:, None], np.minimum(end + 1 + ahead, history.shape[1] - 1)]
    copies = np.where(copies >= 0, copies, drafts)
    differs = copies != drafts
    first = differs.argmax(1)
    each = np.arange(len(first))
    taken = differs[each, first] & ~(margins.numpy()[matched, first] >= margin)
    starts[places] = np.where(taken, first + 1, 0)
    tokens.numpy()[matched[taken], 1:] = copies[taken]


def leading_tokens(logits: Tensor, k: int, noise: Noise | None = None) -> tuple[Tensor, Tensor]:
    """As :func:`sglang_dflash.ops.reference.model.leading_tokens`; a greedy batch needs no sort."""
    if k > 1 and (noise is None or bool((noise.top_ks.numpy() != 1).any())):
        return model.leading_tokens(logits, k, noise)
    rows, each = logits.float().numpy(), np.arange(len(logits))
    values, tokens = np.full((len(rows), k), -np.inf, dtype=np.float32), np.zeros((len(rows), k), dtype=np.int64)
    tokens[:, 0] = rows.argmax(-1)
    values[:, 0] = rows[each, tokens[:, 0]]
    if k > 1:
        others = rows.copy()
        others[each, tokens[:, 0]] = -np.inf
        tokens[:, 1] = others.argmax(-1)
        values[:, 1] = others[each, tokens[:, 1]]
    return torch.from_numpy(values), torch.from_numpy(tokens)


def likeliest_tokens(logits: Tensor, k: int, positions: Tensor, noise: Noise) -> tuple[Tensor, Tensor]:
    """As :func:`sglang_dflash.ops.reference.model.likeliest_tokens`."""
    shape = (*logits.shape[:2], k)
    values, tokens = leading_tokens(logits.flatten(0, 1), k, noise)
    return walk_candidates(tokens.view(shape), values.view(shape), positions, positions, noise)


def walk_candidates(
    candidates: Tensor,
    unary: Tensor,
    anchors: Tensor,
    positions: Tensor,
    noise: Noise | None = None,
    codebooks: Codebooks | None = None,
) -> tuple[Tensor, Tensor]:
    """As :func:`sglang_dflash.ops.reference.model.walk_candidates`; sums may differ in the last bits."""
    sampled = noise is not None and bool((noise.top_ks.numpy() != 1).any())
    if sampled or codebooks is None:
        return model.walk_candidates(candidates, unary, anchors, positions, noise if sampled else None, codebooks)
    gates, predecessors, successors = codebooks
    before, after = (codebook[candidates].float().numpy() for codebook in (predecessors, successors))
    last, gate, scores = predecessors[anchors].float().numpy(), gates.float().numpy(), unary.numpy().copy()
    best, each = np.empty(candidates.shape[:2], dtype=np.int64), np.arange(len(candidates))
    for i in range(candidates.shape[1]):
        scores[:, i] += (after[:, i] @ (last * gate[:, i])[:, :, None])[..., 0]
        best[:, i] = scores[:, i].argmax(1)
        last = before[each, i, best[:, i]]
    chosen = best[..., None]
    first = np.take_along_axis(scores, chosen, 2)
    np.put_along_axis(scores, chosen, -np.inf, 2)
    return candidates.gather(2, torch.from_numpy(chosen)).squeeze(2), torch.from_numpy(first[..., 0] - scores.max(2))


def draw_with_seeds(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw a column of each row by the Gumbel trick, with noise hashed from seed, position and column.

    Args:
        logprobs: of unnormalised probabilities, ``[rows, columns]``; seed, positions: ``[rows]``.

    Returns:
        Int64 ``[rows, 1]``.
    """
    hashed = token_hash(seed.to(torch.int64), positions, torch.arange(logprobs.shape[1]))
    log_uniform = (hashed.double() / 0xFFFFFFFF).log_().clamp_(min=torch.finfo(torch.float64).min, max=-(2.0**-32))
    return (logprobs.double() - log_uniform.neg_().log_()).argmax(1, keepdim=True)
