"""Torch definitions of the operations of one decode step; the Triton kernels equal them.

Shapes: ``bs`` requests, ``w`` block positions (anchor included), ``V`` vocabulary entries, ``T`` tokens, ``L`` drafter
layers. No function synchronises with the device.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_WORD = 0xFFFFFFFF


class Block(NamedTuple):
    """The block that the drafter fills and the target verifies.

    Attributes:
        tokens: int64 [bs, w], the anchor (last step's bonus token), then mask tokens.
        positions: int64 [bs * w], absolute positions ``seq_len + j``.
        slots: int64 [bs * w], KV slots of those positions.
        state_slots: [bs], slots of the requests' recurrent states; None without them.
    """

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    state_slots: Tensor | None


class Accepted(NamedTuple):
    """The commit of one verified block.

    Attributes:
        out_tokens: int64 [bs, w]; the first ``accept_lens[b]`` entries of row b are the new tokens.
        counts: int32 [1, bs], accepted drafts plus the bonus token, 1..w. With an interval int32 [2, bs]: row 1 has the
            new tokens up to the last multiple of it that the committed length reaches or passes, 0 if there is none.
        ends: int32 like ``counts`` minus 1, the block position of the last of these tokens.
        bonus: int64 [bs], the last new token: the next block's anchor.
        new_seq_lens: int64 [bs], committed length after the step; the bonus token has no KV yet.
    """

    out_tokens: Tensor
    counts: Tensor
    ends: Tensor
    bonus: Tensor
    new_seq_lens: Tensor

    @property
    def accept_lens(self) -> Tensor:
        """int32 [bs], the first row of ``counts``."""
        return self.counts[0]


def prepare_block(
    bonus: Tensor,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    width: int,
    mask_token_id: int,
    state_table: Tensor | None = None,
) -> Block:
    """Lay out the next block of every request.

    Positions past the table's last column get slot 0, SGLang's write-only padding slot: a request at the context limit
    still has a full block.

    Args:
        bonus: int64 [bs], anchors.
        seq_lens: int [bs], committed lengths: the anchors' positions.
        req_pool_indices: int [bs], rows of ``req_to_token``.
        req_to_token: int32 [rows, columns], KV slot of each (request, position).
        width: block positions ``w``.
        mask_token_id: token that marks a position to be drafted.
        state_table: [rows], slot of each request's recurrent state.
    """
    offsets = torch.arange(width, device=bonus.device)
    tokens = torch.where(offsets == 0, bonus[:, None], mask_token_id)
    positions = seq_lens.long()[:, None] + offsets
    columns = req_to_token.shape[1]
    rows = req_pool_indices.long()
    slots = req_to_token[rows[:, None], positions.clamp(max=columns - 1)].long()
    slots = torch.where(positions < columns, slots, 0)
    return Block(tokens, positions.flatten(), slots.flatten(), None if state_table is None else state_table[rows])


def take_drafts(
    tokens: Tensor, drafts: Tensor, broken: Tensor, total: Tensor, margins: Tensor | None = None
) -> Tensor | None:
    """Copy what the drafter drafted into the block, out of memory that a later CUDA graph overwrites.

    Past the drafter's block, its last draft is repeated with margin -inf, so that any copy replaces it.

    Args:
        tokens: int64 [bs, w], the block; its columns after the anchor are overwritten.
        drafts: int64 [bs, d - 1] with d <= w.
        broken: int64 [bs], drafted positions whose hidden state was not finite; their sum is added to ``total``, [].
        margins: float32 [bs, d - 1], each draft's lead over the second best token.

    Returns:
        The block's margins, float32 [bs, w - 1]; None without ``margins``.
    """
    beyond = tokens.shape[1] - 1 - drafts.shape[1]
    tokens[:, 1:] = torch.cat((drafts, drafts[:, -1:].expand(-1, beyond)), dim=1) if beyond else drafts
    total += broken.sum()
    return None if margins is None else F.pad(margins, (0, beyond), value=-torch.inf)


def accept_block(draft_tokens: Tensor, target_tokens: Tensor, seq_lens: Tensor, *, interval: int = 0) -> Accepted:
    """Commit the longest prefix of the drafts that the target chose itself, plus the target's next token.

    Draft j+1 is accepted while it equals ``target_tokens[j]``. The target's token at the first difference, or after the
    last draft, is the bonus. So every new token *is* the target's token, and ``out_tokens`` is ``target_tokens``.

    This is exact for sampled requests too. Write d for the drafts, p(. | c) for the target's distribution after context
    c with temperature, filters and penalties applied. Let ``target_tokens[j]`` be a draw from p(. | c, d_1..d_j) whose
    noise is independent of c and d. Position j is used only if d_1..d_j were accepted, that is, if they are the tokens
    emitted. Hence each emitted token is a draw from p given exactly the tokens emitted before it, which is the law of
    plain decoding. A draft x is kept with probability p(x), the most that any rule can reach for a drafter that
    proposes one fixed token (Leviathan et al. 2023, section 2.3, with a point-mass proposal: min(1, p(x) / 1)). Draws
    after the first difference influence nothing, so noise that is a function of (seed, position) may meet the same
    position again in the next step without bias. The same noise thus gives the same text for every block width, drafter
    and batch, and in plain decoding.

    Args:
        draft_tokens: int64 [bs, w], the verified block; column 0 is the anchor, column j the draft for position j.
        target_tokens: int64 [bs, w], the token that the target puts after each block position: its argmax for a greedy
            request, a draw from its distribution for a sampled one.
        seq_lens: int [bs], committed lengths before the step.
        interval: tokens between boundaries; 0 to ask for none.
    """
    agree = (draft_tokens[:, 1:] == target_tokens[:, :-1]).int()
    accepted_drafts = agree.cumprod(dim=1).sum(dim=1)
    bonus = target_tokens.gather(1, accepted_drafts[:, None]).squeeze(1)
    new_seq_lens = seq_lens.long() + accepted_drafts + 1
    counts = (accepted_drafts + 1)[None]
    if interval:
        counts = torch.cat((counts, (new_seq_lens // interval * interval - seq_lens).clamp(min=0)[None]))
    counts = counts.int()
    return Accepted(target_tokens, counts, counts - 1, bonus, new_seq_lens)


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
    """Append tokens to the histories, and find the longest earlier occurrence of every request's newest tokens.

    Of equally long ones the newest. One number orders all occurrences, so the work can be divided in any way; that of
    a later step is greater, so it replaces the number before it.

    Args:
        history: int32 [R, C], the token at each position of a request; negative where no token can be copied. Later
            columns are stale and never read, nor is the last one: positions past the table are written there.
        found: int64 [R, 2]; column 0, below ``last * 2**36``, receives ``last * 2**36 + length * 2**31 + end``: the
            length of the match, 0 for none, and the position of its last token.
        rows: int [bs], distinct rows of both.
        seq_lens: int [bs], position of the newest token so far.
        tokens: int64 [bs, w], the tokens after it, accepted or not.
        last: int [bs], position of the newest accepted token.
        longest: length up to which matches count, at most 31.
        bound: upper bound of ``last``, on the host.
    """
    rows, last = rows.long(), last.long()[:, None]
    positions = seq_lens.long()[:, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    history[rows[:, None], positions.clamp_(max=history.shape[1] - 1)] = tokens.int()
    columns = min(bound, history.shape[1] - 1) + 1
    known = torch.nn.functional.pad(history[rows, :columns], (longest - 1, 0), value=-1)
    newest = known.gather(1, last + torch.arange(longest, device=last.device))
    differs = (known.unfold(1, longest, 1) != newest[:, None]) | (newest < 0)[:, None]
    # The difference that is nearest to the end bounds the match.
    nearness = torch.arange(1, longest + 1, dtype=torch.int8, device=last.device)
    lengths = longest - (differs * nearness).amax(2).long()
    ends = torch.arange(columns, device=last.device)
    keys = torch.where((ends < last) & (lengths > 0), (lengths << 31) + ends, 0)
    found[rows, 0] = (last[:, 0] << 36) + keys.amax(1)


def offer_copies(
    tokens: Tensor,
    margins: Tensor,
    history: Tensor,
    found: Tensor,
    rows: Tensor,
    last: Tensor,
    *,
    least: int,
    unsure: float,
) -> None:
    """Replace drafts with copies where the drafter is unsure.

    A copy is the text after the match; past the newest token it repeats itself. Where copy and drafts first differ, the
    drafter decides, since it has read the context too.

    Args:
        tokens: int64 [bs, w], the block: anchor, then drafts, replaced in place.
        margins: float32 [bs, w - 1], the drafter's largest logit minus its second largest at each draft.
        history, found: as left by :func:`match_copies`. Column 1 of ``found`` receives the block position of the first
            replaced draft, 0 for none.
        rows: int [bs], distinct rows of both.
        last: int [bs], position of the anchor.
        least: shortest match that is copied.
        unsure: margin below which the copy is taken.
    """
    rows, drafts = rows.long(), tokens[:, 1:]
    key = found[rows, 0][:, None]
    length, end = (key >> 31) & 31, key & 0x7FFFFFFF
    ahead = torch.arange(drafts.shape[1], device=tokens.device) % (last.long()[:, None] - end).clamp_(min=1)
    copies = history[rows[:, None], (end + 1 + ahead).clamp_(max=history.shape[1] - 1)].long()
    copies = torch.where((copies >= 0) & (length >= least), copies, drafts)
    differs = copies != drafts
    first = differs.int().argmax(1, keepdim=True)
    taken = differs.gather(1, first) & (margins.gather(1, first) < unsure)
    found[rows, 1] = torch.where(taken, first + 1, 0).squeeze(1)
    drafts.copy_(torch.where(taken, copies, drafts))


def view_rings(
    table: Tensor,
    oldest: Tensor,
    rows: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    *,
    first: int,
    size: int,
    window: int,
    page: int,
) -> tuple[Tensor, Tensor]:
    """Write the slots of every request's ring from its oldest visible token on, and look the block's slots up.

    Position ``p`` of row ``r`` has the slot ``first + (r - 1) * size + p % size``.

    Args:
        table: int32 [R, C] with C >= ``size``; the first ``size`` columns of ``rows`` are written.
        oldest: int64 [R], oldest position that each row's ring holds.
        rows: int64 [bs], distinct, from 1; bs > 0.
        seq_lens: int [bs], committed lengths.
        positions: int64 [bs * w], of the blocks.
        window: tokens before the block that it sees; ``page``: their first position is rounded down to a multiple.

    Returns:
        lengths, int64 [bs], committed tokens from the oldest visible one on; slots, int64 [bs * w].
    """
    reach = seq_lens.long() - window
    start = torch.maximum(oldest[rows], reach - reach % page)
    ring = (first + (rows - 1) * size)[:, None]
    table[rows, :size] = (ring + (start[:, None] + torch.arange(size, device=rows.device)) % size).int()
    return seq_lens - start, (ring + positions.view(len(rows), -1) % size).flatten()


def norm_rope(
    heads: Tensor, norm_weight: Tensor, eps: float, positions: Tensor, cos_sin: Tensor, *, neox: bool = True
) -> Tensor:
    """RMS-normalise and rotate attention heads, in float32.

    Args:
        heads: [L, T, heads, head_dim]; the last dimension is dense.
        norm_weight: [L, heads, head_dim]; the last dimension is dense.
        eps: added to the mean square.
        positions: int64 [T], absolute positions.
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


def convolve_block(hidden: Tensor, base: Tensor, corrections: Tensor, *, width: int) -> Tensor:
    """Convolve the positions of each block: ``out[i] = sum over t of (base[t] + corrections[i, t]) * hidden[i - t]``.

    Positions before the block count as zeros.

    Args:
        hidden: [bs * w, H].
        base: [taps, H], the same at every position.
        corrections: [bs * w, taps, G], one per group of ``H / G`` adjacent channels; the last dimension is dense.
        width: positions ``w`` of a block.

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


def top_k(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the ``k`` largest values of each row, the largest first, and their indices int64: [rows, V] to [rows, k].

    Which of equal values at the end is returned, and their order, is unspecified.
    """
    return logits.topk(k)


def walk_candidates(
    candidates: Tensor, unary: Tensor, gates: Tensor, anchors: Tensor, predecessors: Tensor, successors: Tensor
) -> tuple[Tensor, Tensor]:
    """Choose a token per position, from left to right: the candidate with the best score after the token before.

    The score of candidate c after token p is ``unary[c] + sum over r of predecessors[p, r] * gates[r] *
    successors[c, r]``, in float32.

    Args:
        candidates: int64 [bs, n, K], distinct tokens at each position.
        unary: float32 [bs, n, K], their scores without the token before.
        gates: [bs, n, R].
        anchors: int64 [bs], the token before the first position.
        predecessors, successors: [V, R], codebooks of the token before and of the candidate.

    Returns:
        int64 [bs, n], the tokens, the first of equals; and float32 [bs, n], their leads over the second best candidate,
        infinite if there is none.
    """
    last, tokens, leads = anchors, [], []
    for i in range(candidates.shape[1]):
        key = predecessors[last].float() * gates[:, i].float()
        scores = unary[:, i] + (successors[candidates[:, i]].float() @ key[:, :, None]).squeeze(2)
        best = scores.argmax(1, keepdim=True)
        last = candidates[:, i].gather(1, best).squeeze(1)
        tokens.append(last)
        leads.append(scores.gather(1, best).squeeze(1) - scores.scatter(1, best, -torch.inf).amax(1))
    return torch.stack(tokens, 1), torch.stack(leads, 1)


def penalize_block(logits: Tensor, draft_tokens: Tensor, counts: Tensor, rows: Tensor, coefficients: Tensor) -> None:
    """Apply frequency, presence and repetition penalties to a block's logits, in place.

    With n the count of a token: ``logit -= frequency * n + presence * [n > 0]``, then, if n > 0, a positive logit is
    divided and a negative one multiplied by ``repetition`` (SGLang's definition and order). Position j counts the
    drafts 1..j as generated, because its logits are used only if they are accepted.

    Args:
        logits: float32 [bs, w, V]; ``logits[b, j]`` follows block position j.
        draft_tokens: int64 [bs, w]; column 0 is the anchor.
        counts: int32 [R, V], generated tokens of each request, the anchor included.
        rows: int [bs], rows of ``counts`` and ``coefficients``.
        coefficients: float32 [R, 3], frequency, presence and repetition penalty; (0, 0, 1) changes nothing.
    """
    frequency, presence, repetition = coefficients[rows.long()][:, None, None, :].unbind(-1)

    def penalized(values: Tensor, n: Tensor) -> Tensor:
        values = values - frequency * n - presence * (n > 0)
        scale = torch.where(n > 0, repetition, 1.0)
        return torch.where(values < 0, values * scale, values / scale)

    # Within a block only the entries of drafted tokens differ from the committed counts: O(w^2) per request.
    bs, width = draft_tokens.shape
    committed = counts[rows.long()][:, None, :]
    drafts = draft_tokens[:, None, 1:]
    drafted = (draft_tokens[:, 1:, None] == drafts).int().cumsum(dim=1)
    drafted = torch.cat((torch.zeros_like(drafts, dtype=drafted.dtype), drafted), dim=1)  # none before position 0
    drafts = drafts.expand(bs, width, width - 1)
    at_drafts = penalized(logits.gather(2, drafts), committed.expand(bs, width, -1).gather(2, drafts) + drafted)
    logits.copy_(penalized(logits, committed))
    logits.scatter_(2, drafts, at_drafts)


def filter_probs(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor) -> Tensor:
    """Zero the entries that top-k, top-p and min-p exclude; the others keep their value (not renormalised).

    Filters and order are those of SGLang's ``pytorch`` sampling backend, so the law of a draw is plain decoding's.

    Args:
        probs: float32 [n, V], softmax of the adjusted logits.
        top_ks: int [n], entries kept by rank.
        top_ps: float [n]; an entry stays while the mass ranked above it, cut by top-k or not, is at most ``top_p``.
            From 1 on there is no limit: the rounding of a sum must not cut the tail when other requests filter.
        min_ps: float [n], floor relative to the largest entry.
    """
    ranked, order = probs.sort(dim=-1, descending=True)
    ranks = torch.arange(probs.shape[-1], device=probs.device)
    above = ranked.cumsum(dim=-1) - ranked
    top_ps = top_ps.masked_fill(top_ps >= 1, torch.inf)
    keep = (ranks < top_ks[:, None]) & (above <= top_ps[:, None]) & (ranked >= ranked[:, :1] * min_ps[:, None])
    return torch.zeros_like(probs).scatter_(-1, order, ranked.where(keep, 0.0))


def repeat_rows(*vectors: Tensor | None, width: int) -> tuple[Tensor | None, ...]:
    """Repeat every entry of five vectors of [bs] or [bs, 1] ``width`` times in a row; None stays, but for the first."""
    return tuple(None if vector is None else vector.repeat_interleave(width, dim=0) for vector in vectors)


def seeded_tokens(
    logits: Tensor,
    temperatures: Tensor,
    filters: tuple[Tensor, Tensor, Tensor] | None,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """Draw each row's token from its logits. The logits do not change.

    A row of top-k 1, which SGLang makes of a greedy request beside sampled ones, takes the first of its largest logits.
    The kernel sums in another order, so a token at the edge of top-p may fall on either side. It keeps all tokens of a
    weight at the edge of top-k or top-p, as FlashInfer does; here the sort decides between them, as in SGLang's
    ``pytorch`` backend.

    Args:
        logits: float [n, V].
        temperatures: float32 [n, 1], positive.
        filters: ``top_ks`` int32, ``top_ps`` and ``min_ps`` float32, [n] each; see :func:`filter_probs`. None for none.
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


def seeded_draw(weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw one token per row in proportion to ``weights``, with noise fixed by (seed, position, token).

    An exponential race: token v rings after time -log(u_v) / weight_v, with u_v uniform from :func:`token_hash`. The
    first to ring wins, with probability weight_v / sum(weights). Winners have u_v close to 1, where float32 has few
    values: the race runs in float64.

    Args:
        weights: float32 [n, V], non-negative, at least one positive per row; need not sum to 1.
        seeds: int64 [n].
        positions: int64 [n], sequence position of the token before the draw.

    Returns:
        int64 [n].
    """
    tokens = torch.arange(weights.shape[1], device=weights.device)
    uniform = (token_hash(seeds, positions, tokens).double() + 0.5) * 2.0**-32
    return (-uniform.log() / weights.double()).argmin(dim=1)


def token_hash(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """MurmurHash3 (x86, 32 bit, Appleby) of the 16 bytes (seed, position, token), seeded with 0.

    Args:
        seeds: int64 [n], all 64 bits used.
        positions: int [n] and tokens: int [m], lower 32 bits used.

    Returns:
        int64 [n, m] of unsigned 32-bit values.
    """
    state = torch.zeros_like(seeds, dtype=torch.int64)
    for word in (seeds & _WORD, (seeds >> 32) & _WORD, positions.long() & _WORD):
        state = _murmur_block(state, word)
    state = _murmur_block(state[:, None], tokens.long()[None, :] & _WORD)
    state = state ^ 16
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & _WORD
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & _WORD
    return state ^ (state >> 16)


def _murmur_block(state: Tensor, word: Tensor) -> Tensor:
    # int64 products wrap, which leaves the low 32 bits right.
    word = _rotate_left((word * 0xCC9E2D51) & _WORD, 15)
    state = _rotate_left(state ^ ((word * 0x1B873593) & _WORD), 13)
    return (state * 5 + 0xE6546B64) & _WORD


def _rotate_left(word: Tensor, bits: int) -> Tensor:
    return ((word << bits) | (word >> (32 - bits))) & _WORD


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias``: ``[..., I]`` and ``[O, I]`` to ``[..., O]``."""
    return F.linear(x, weight, bias)


def argmax(logits: Tensor) -> Tensor:
    """Return the index of each row's largest value, the first of equals: [rows, V] to int64 [rows]."""
    return logits.argmax(-1)


@cache
def _constant(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """Return ``1 / sqrt(mean(x**2) + eps)`` over the last dimension of float32 ``x``: ``[..., 1]``."""
    # Few ops: small models on a CPU are bound by dispatch.
    norm = torch.linalg.vector_norm(x, 2, -1, True)
    return torch.addcmul(_constant(eps, x.device), norm, norm, value=1 / x.shape[-1]).rsqrt_()
