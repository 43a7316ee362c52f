"""Sampling definitions: penalties, filters, and seeded draws from logits."""

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF


def penalize_block(logits: Tensor, draft_tokens: Tensor, counts: Tensor, rows: Tensor, coefficients: Tensor) -> None:
    """Apply frequency, presence and repetition penalties to a block's logits, in place.

    With n the count of a token: ``logit -= frequency * n + presence * [n > 0]``, then, if n > 0, a positive logit is
    divided and a negative one multiplied by ``repetition`` (SGLang's definition and order). Position j counts drafts
    1..j as generated.

    Args:
        logits: float32 [bs, w, V]; ``logits[b, j]`` follows block position j.
        draft_tokens: int64 [bs, w]; column 0 is the anchor.
        counts: int32 [R, V], generated tokens, anchor included.
        rows: int [bs], rows of ``counts`` and ``coefficients``.
        coefficients: float32 [R, 3], frequency, presence and repetition penalty.
    """
    frequency, presence, repetition = coefficients[rows.long()][:, None, None, :].unbind(-1)

    def penalized(values: Tensor, n: Tensor) -> Tensor:
        values = values - frequency * n - presence * (n > 0)
        scale = torch.where(n > 0, repetition, 1.0)
        return torch.where(values < 0, values * scale, values / scale)

    # only the entries of drafted tokens differ from the committed counts: O(w^2) per request
    bs, width = draft_tokens.shape
    committed = counts[rows.long()][:, None, :]
    drafts = draft_tokens[:, None, 1:]
    drafted = (draft_tokens[:, 1:, None] == drafts).int().cumsum(dim=1)
    drafted = torch.cat((torch.zeros_like(drafts, dtype=drafted.dtype), drafted), dim=1)
    drafts = drafts.expand(bs, width, width - 1)
    at_drafts = penalized(logits.gather(2, drafts), committed.expand(bs, width, -1).gather(2, drafts) + drafted)
    logits.copy_(penalized(logits, committed))
    logits.scatter_(2, drafts, at_drafts)


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Zero the entries that top-k, top-p and min-p exclude; the others keep their value (not renormalised).

    Filters and order are those of SGLang's ``pytorch`` sampling backend.

    Args:
        probs: float32 [n, V], softmax of the adjusted logits.
        top_ks: int [n], entries kept by rank.
        top_ps: float [n]; an entry stays while the mass ranked above it, cut by top-k or not, is at most ``top_p``.
            From 1 on there is no limit: rounding must not cut the tail.
        min_ps: float [n], floor relative to the largest entry.
    """
    ranked, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    above = ranked.cumsum(dim=-1) - ranked
    top_ps = top_ps.masked_fill(top_ps >= 1, torch.inf)
    keep = (ranks < top_ks[:, None]) & (above <= top_ps[:, None]) & (ranked >= ranked[:, :1] * min_ps[:, None])
    return torch.zeros_like(probs).scatter_(-1, order, ranked.where(keep, 0.0))


def seeded_tokens(
    logits: Tensor, temperatures: Tensor, filters: tuple[Tensor, Tensor, Tensor] | None, seeds: Tensor,
    positions: Tensor,
) -> Tensor:  # fmt: skip
    """Draw each row's token from its logits, which do not change.

    A row of top-k 1 takes the first of its largest logits: SGLang gives a greedy request in a sampled batch top-k 1.
    The kernel may decide otherwise for tokens at the edge of a filter.

    Args:
        logits: float [n, V].
        temperatures: float32 [n, 1], positive.
        filters: ``top_ks`` int32, ``top_ps`` and ``min_ps`` float32, [n] each, or None.
        seeds: int64 [n].
        positions: int64 [n], sequence position of the token before the draw.

    Returns:
        int64 [n].
    """
    probs = torch.softmax(logits / temperatures, dim=-1)
    if filters is None:
        return seeded_draw(probs, seeds, positions)
    drawn = seeded_draw(filter_probs(probs, *filters), seeds, positions)
    return torch.where(filters[0] == 1, logits.argmax(-1), drawn)


def seeded_draw(weights: Tensor, seeds: Tensor, positions: Tensor, tokens: Tensor | None = None) -> Tensor:
    """Draw one column per row in proportion to ``weights``, with noise fixed by (seed, position, token).

    An exponential race: token v arrives after time -log(u_v) / weight_v, with u_v uniform from :func:`token_hash`, and
    is the first with probability weight_v / sum(weights). Winners have u_v close to 1, where float32 has few values:
    the race runs in float64.

    Args:
        weights: float32 [n, V], non-negative, at least one positive per row.
        tokens: int64 [n, V], those of the columns; None for 0 to V - 1.
    """
    if tokens is None:
        tokens = torch.arange(weights.shape[1], device=weights.device)
    uniform = (token_hash(seeds, positions, tokens).double() + 0.5) * 2.0**-32
    return (-uniform.log() / weights.double()).argmin(dim=1)


def token_hash(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit, Appleby) of the 16 bytes (seed, position, token), seeded with 0.

    Args:
        seeds: int64 [n]; positions: int [n]; tokens: int [m] or [n, m]. Positions and tokens are cut to 32 bits.

    Returns:
        int64 [n, m] of unsigned 32-bit values.
    """
    state = torch.zeros_like(seeds, dtype=torch.int64)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions.long() & _WORD):
        state = _murmur_block(state, word)
    state = _murmur_block(state[:, None], tokens.long() & _WORD)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return state ^ (state >> 16)


def _murmur_block(state: Tensor, word: Tensor) -> Tensor:
    # int64 products wrap, which keeps the low 32 bits correct
    word = _rotate_left((word * 0xCC9E2D51) & _WORD, 15)
    state = _rotate_left(state ^ ((word * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotate_left(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD
