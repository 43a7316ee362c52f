"""Attention over a paged KV pool in plain torch: positions, masks and SDPA calls, without SGLang.

Slots and masks are built once per forward. A batch is two gathers and one SDPA call, because small models are bound by
dispatch. Scores, softmax and sums are float32: torch's bfloat16 attention of one query is 3 to 10 times slower than
converting the keys (AMD EPYC with AVX512-BF16).

Shapes: ``B`` requests, ``T`` queries and ``C`` (padded) keys per request, ``H``/``G`` query/KV heads, ``D`` head dim. A
window has the ``w`` positions before a query's own, and the ``w`` after if it is not causal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

# A causal tile of a long prompt reads only the keys before its end; a mask has at most QUERY_TILE x context entries.
QUERY_TILE = 512
# Padded query-key pairs that take as long as the calls for one more request (4 to 8 heads of 64).
PAIRS_PER_REQUEST = 1024
ROW_TILE = 64  # a row's keys are padded to a multiple


@dataclass(frozen=True)
class Contexts:
    """K/V of a batch: KV slots ``[requests, positions]`` int32, each request's row and length ``[B]``."""

    table: Tensor
    rows: Tensor
    lens: Tensor

    def slots(self, columns: Tensor) -> Tensor:
        """Return ``table[rows[b], columns[b, c]]`` as ``[B, C]``."""
        flat = self.rows.unsqueeze(1) * self.table.stride(0) + columns
        return self.table.view(-1).index_select(0, flat.view(-1)).view(columns.shape)

    def lengths(self) -> list[int]:
        """Return ``lens`` as a list."""
        lengths: list[int] = self.lens.numpy().tolist()
        return lengths


@dataclass(frozen=True)
class Keys:
    """Pool slots ``[B*C]``, and a mask to add to the scores or None, ``[B, 1, T, C]``."""

    slots: Tensor
    mask: Tensor | None


def visible(query_positions: Tensor, key_positions: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Return the keys that a query may read, from positions ``[..., T]`` and ``[..., C]``: bool ``[..., T, C]``."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    if window is None:
        return distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return (distance <= window) & (distance >= (0 if causal else -window))


def additive(allowed: Tensor) -> Tensor:
    """Return a bool mask ``[..., T, C]`` as scores: 0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))


def decode_keys(contexts: Contexts, *, window: int | None) -> list[Keys]:
    """Return the keys of one new token per request; ``contexts`` include it."""
    lens, lengths = contexts.lens, contexts.lengths()
    longest, shortest = max(1, *lengths), min(lengths)
    width = longest if window is None else min(longest, window + 1)
    # The mask removes columns past the length of a request shorter than the width.
    columns = torch.arange(width).expand(len(lens), width)
    if width < longest:
        columns = (lens - width).clamp_(min=0).unsqueeze(1) + columns
    # A padded request has length 0; it reads position 0 so that its softmax has a term.
    newest = (lens.clamp(min=1) - 1).unsqueeze(1)
    # A masked column reads the newest token too: another slot may hold NaN, which a weight of 0 does not remove.
    slots = contexts.slots(torch.minimum(columns, newest)).view(-1)
    if shortest == longest:
        return [Keys(slots, None)]
    mask = additive(visible(newest, columns, causal=True, window=window))
    return [Keys(slots, mask.unsqueeze(1))]


def row_keys(contexts: Contexts, *, window: int | None) -> list[tuple[Tensor, Keys]]:
    """Return the keys of one new token per row, padded by the row's own length; ``contexts`` include the token.

    Rows of one padded length are a group ``(row numbers, Keys)``, so a row's sums never depend on other rows.
    """
    lens = contexts.lens.clamp(min=1)
    oldest = torch.zeros_like(lens) if window is None else (lens - 1 - window).clamp_(min=0)
    counts = (lens - oldest).unsqueeze(1)
    padded = (counts[:, 0] + ROW_TILE - 1) // ROW_TILE * ROW_TILE
    groups = []
    for length in padded.unique().tolist():
        rows = (padded == length).nonzero()[:, 0]
        columns = torch.arange(length).expand(len(rows), length)
        inside = columns < counts[rows]
        positions = oldest[rows, None] + torch.where(inside, columns, 0)
        slots = Contexts(contexts.table, contexts.rows[rows], lens[rows]).slots(positions).view(-1)
        groups.append((rows, Keys(slots, additive(inside)[:, None, None])))
    return groups


def attend_rows(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    groups: list[tuple[Tensor, Keys]],
    *,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    out = q.new_empty(*q.shape[:2], v_pool.shape[-1])
    for rows, keys in groups:
        out[rows] = attend(q[rows], k_pool, v_pool, [keys], batch=len(rows), scale=scale, sinks=sinks)
    return out


def block_keys(contexts: Contexts, block_slots: Tensor, *, causal: bool, window: int | None) -> list[Keys]:
    """Return the keys of ``T`` tokens per request, of one padded batch or of each request.

    Args:
        contexts: without the block; block_slots: KV slots of the block ``[B, T]``.
        causal: true for verification, false for a drafter's block.
    """
    if padding_pays(contexts.lengths(), block_slots.shape[1], window):
        return [padded_block_keys(contexts, block_slots, causal=causal, window=window)]
    return separate_block_keys(contexts, block_slots, causal=causal, window=window)


def padding_pays(lens: list[int], queries: int, window: int | None) -> bool:
    """Return whether one padded batch is faster."""
    reach = lens if window is None else [min(length, window) for length in lens]
    padding = len(reach) * max(reach) - sum(reach)
    return padding * queries <= PAIRS_PER_REQUEST * (len(reach) - 1)


def padded_block_keys(contexts: Contexts, block_slots: Tensor, *, causal: bool, window: int | None) -> Keys:
    # Columns -C .. T - 1 count from the block's start, so one mask serves all requests.
    lens, lengths = contexts.lens, contexts.lengths()
    reach = max(1, *lengths) if window is None else min(max(1, *lengths), window)
    steps, columns = torch.arange(block_slots.shape[1]), torch.arange(-reach, block_slots.shape[1])
    context = contexts.slots((lens.unsqueeze(1) + columns[:reach]).clamp_(min=0))
    slots = torch.cat((context, block_slots.to(context.dtype)), dim=1).view(-1)
    mask = additive(visible(steps, columns, causal=causal, window=window)) if causal or window is not None else None
    if min(lengths) >= reach:
        return Keys(slots, mask)
    padding = additive(columns >= -lens.unsqueeze(1))[:, None, None]
    return Keys(slots, padding if mask is None else padding + mask)


def separate_block_keys(contexts: Contexts, block_slots: Tensor, *, causal: bool, window: int | None) -> list[Keys]:
    """:func:`block_keys` of each request, without padding."""
    table, rows, lengths = contexts.table, contexts.rows.numpy().tolist(), contexts.lengths()
    reach = [length if window is None else min(length, window) for length in lengths]
    blocks = block_slots.to(table.dtype).unbind()
    slots = [
        torch.cat([table[row, length - read : length], block])
        for row, length, read, block in zip(rows, lengths, reach, blocks, strict=True)
    ]
    if not causal and window is None:
        return [Keys(each, None) for each in slots]
    # Counted from the block's start, the last ``C`` columns of the longest mask serve every request.
    steps, columns = torch.arange(block_slots.shape[1]), torch.arange(-max(reach), block_slots.shape[1])
    mask = additive(visible(steps, columns, causal=causal, window=window))
    return [Keys(each, mask[:, -each.shape[0] :]) for each in slots]


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    keys: list[Keys],
    *,
    batch: int,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from ``T`` tokens of each of ``batch`` requests: ``q [B*T, H, D]`` to ``[B*T, H, Dv]``.

    Args:
        k_pool, v_pool: ``[slots, G, D]`` and ``[slots, G, Dv]``, any float dtype.
        keys: of the whole batch, or of each request.
        scale: of the scores.
        sinks: score of each head that adds to its softmax's sum only, ``[H]``, or None.
    """
    if len(keys) > 1:
        blocks = zip(q.chunk(len(keys)), keys, strict=True)
        parts = [attend(block, k_pool, v_pool, [own], batch=1, scale=scale, sinks=sinks) for block, own in blocks]
        return torch.cat(parts)
    slots, mask = keys[0].slots, keys[0].mask
    k, v = (pool.index_select(0, slots).float().view(batch, -1, *pool.shape[1:]) for pool in (k_pool, v_pool))
    out = _attention(q.float().view(batch, -1, *q.shape[1:]), k, v, mask, scale=scale, sinks=sinks)
    return out.reshape(*q.shape[:2], -1).to(q.dtype)


def attend_prompt(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    prefix: int,
    causal: bool,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend from a prompt chunk of one request to its prefix and itself; return ``[T, H, Dv]``.

    Args:
        q: queries of positions ``prefix .. prefix + T - 1``, ``[T, H, D]``.
        k, v: ``[C, G, D]``, up to the chunk's end, without positions before the window.
    """
    q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    if prefix == 0 and causal and window is None and sinks is None:
        return _attention(q, k, v, None, causal=True, scale=scale)[0]
    end = prefix + q.shape[1]
    first = end - k.shape[1]
    tiles = []
    for start in range(prefix, end, QUERY_TILE):
        stop = min(start + QUERY_TILE, end)
        reach = stop if causal else end if window is None else min(stop + window, end)
        oldest = first if window is None else max(first, start - window)
        span = slice(oldest - first, reach - first)
        mask = None
        if causal or window is not None:
            positions, key_positions = torch.arange(start, stop), torch.arange(oldest, reach)
            mask = additive(visible(positions, key_positions, causal=causal, window=window))
        queries = q[:, start - prefix : stop - prefix]
        tiles.append(_attention(queries, k[:, span], v[:, span], mask, scale=scale, sinks=sinks))
    return (tiles[0] if len(tiles) == 1 else torch.cat(tiles, 1))[0]


def attend_prompt_rows(
    q: Tensor, k: Tensor, v: Tensor, *, prefix: int, window: int | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Causal :func:`attend_prompt` with keys from position 0, whose rows do not depend on where the prompt is split."""
    positions = torch.arange(prefix, prefix + len(q))
    padded = (positions + ROW_TILE) // ROW_TILE * ROW_TILE
    k, v = (pad(pool, (0, 0, 0, 0, 0, int(padded[-1]) - len(pool))) for pool in (k, v))
    parts = []
    for length in padded.unique().tolist():
        rows = padded == length
        mask = additive(visible(positions[rows, None], torch.arange(length), causal=True, window=window))
        keys, values = (pool[:length].expand(int(rows.sum()), -1, -1, -1) for pool in (k, v))
        parts.append(_attention(q[rows].unsqueeze(1), keys, values, mask[:, None], scale=scale, sinks=sinks)[:, 0])
    return torch.cat(parts)


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    # q [B, T, H, D], k [B, C, G, D] and v [B, C, G, Dv] to [B, T, H, Dv]
    if sinks is not None:  # one more key and value of zeros, with the sink as its score
        rows = (q.shape[0], q.shape[2], q.shape[1])
        mask = torch.zeros(*rows, k.shape[1]) if mask is None else mask.expand(*rows, -1)
        mask = torch.cat((mask, sinks.float()[:, None, None].expand(*rows, 1)), -1)
        k, v = (pad(each, (0, 0, 0, 0, 0, 1)) for each in (k, v))
    out = scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    return out.transpose(1, 2)
