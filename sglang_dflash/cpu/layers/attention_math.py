"""Attention over a paged KV pool in plain torch: positions, masks and SDPA calls.

Everything here is tensors in, tensors out, and does not import SGLang. Two ideas carry it:

* Every query and every key has an absolute **position**; what a query may read follows from the two
  positions alone (:func:`visible`), so decode, verification and the drafter's block differ only in the
  positions they pass.
* A tiny model spends its time in dispatch, not arithmetic, so what all layers share (slots, mask) is built
  once per forward, and a batch is two gathers and one ``scaled_dot_product_attention``, padded to its longest
  request. Only where blocks have so many queries, or contexts so different lengths, that the padding costs more than
  the calls it saves (:func:`padding_pays`), each request has its own.

Scores, softmax and sums are float32 whatever the dtype of the model: torch's bfloat16 attention of one
query is 3 to 10 times slower on a CPU than converting the gathered keys (AMD EPYC with AVX512-BF16; equal
for prompts).

Shapes: ``B`` requests, ``T`` queries per request, ``C`` keys per request (padded), ``H``/``G`` query/KV
heads, ``D`` head dim. A window ``w`` lets a query read the ``w`` positions before its own (and, where it is
not causal, the ``w`` after).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

# Queries of a long prompt are processed this many at a time: a causal tile reads only the keys before its
# end, so half of the square is never computed, and a mask is at most QUERY_TILE x context.
QUERY_TILE = 512
# Query-key pairs of padding that take as long as the calls for one more request (with 4 to 8 heads of 64).
PAIRS_PER_REQUEST = 1024


@dataclass(frozen=True)
class Keys:
    """What is read of the pool, and a mask to add to the scores (None: everything may be read).

    Of a batch: ``slots [B*C]``, ``mask`` that broadcasts to ``[B, 1, T, C]``; of one request's block: ``slots [C]``,
    ``mask [T, C]``.
    """

    slots: Tensor
    mask: Tensor | None


def visible(query_positions: Tensor, key_positions: Tensor, *, causal: bool, window: int | None) -> Tensor:
    """Which keys a query may read, from positions ``[..., T]`` and ``[..., C]``: bool ``[..., T, C]``."""
    distance = query_positions.unsqueeze(-1) - key_positions.unsqueeze(-2)
    if window is None:
        return distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    return (distance <= window) & (distance >= (0 if causal else -window))


def additive(allowed: Tensor) -> Tensor:
    """Bool mask ``[..., T, C]`` as scores to add: 0 where allowed, -inf elsewhere."""
    return torch.zeros(allowed.shape).masked_fill_(~allowed, float("-inf"))


def context_columns(lens: Tensor, longest: int, reach: int | None) -> Tensor:
    """Token positions ``[B, C]`` that each request may have to read, ``C = min(longest, reach)``.

    ``reach`` counts the positions before ``lens [B]`` that are worth reading (None: all). A request shorter
    than ``C`` gets positions from ``lens`` on at its end; the caller masks those.
    """
    width = longest if reach is None else min(longest, reach)
    columns = torch.arange(width)
    if width == longest:
        return columns.expand(lens.shape[0], width)
    return (lens - width).clamp_(min=0).unsqueeze(1) + columns


def gather_slots(req_to_token: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``req_to_token[rows[b], columns[b, c]]`` as ``[B, C]``; one ``index_select`` on the flattened table."""
    flat = rows.unsqueeze(1) * req_to_token.stride(0) + columns
    return req_to_token.view(-1).index_select(0, flat.view(-1)).view(columns.shape)


def decode_keys(
    req_to_token: Tensor,
    rows: Tensor,
    lens: Tensor,
    longest: int,
    shortest: int,
    *,
    window: int | None,
) -> Keys:
    """Keys of one new token per request.

    Args:
        req_to_token: KV slots ``[requests, positions]`` int32.
        rows: row of each request ``[B]`` int64.
        lens: length ``[B]``, the new token included (its K/V are in the pool already).
        longest, shortest: ``lens.max()`` and ``lens.min()`` as host numbers.
        window: sliding window, or None.
    """
    columns = context_columns(lens, longest, None if window is None else window + 1)
    slots = gather_slots(req_to_token, rows, columns)
    if shortest == longest:  # every column is a real token inside the window
        return Keys(slots.view(-1), None)
    # A padded request has length 0; it reads position 0 so that its softmax has a term.
    newest = (lens.clamp(min=1) - 1).unsqueeze(1)
    mask = additive(visible(newest, columns, causal=True, window=window))
    return Keys(slots.view(-1), mask.unsqueeze(1))


def padding_pays(lens: list[int], queries: int, window: int | None) -> bool:
    """Whether blocks of ``queries`` tokens behind contexts of ``lens`` are attended to faster in one padded batch."""
    reach = lens if window is None else [min(length, window) for length in lens]
    padding = len(reach) * max(reach) - sum(reach)
    return padding * queries <= PAIRS_PER_REQUEST * (len(reach) - 1)


def batched_block_keys(
    req_to_token: Tensor,
    rows: Tensor,
    lens: Tensor,
    longest: int,
    shortest: int,
    block_slots: Tensor,
    *,
    causal: bool,
    window: int | None,
) -> Keys:
    """Keys of a block of ``T`` tokens of each request, as one padded batch; arguments as in the functions beside it.

    Columns count from the start of the block, ``-C .. T - 1``, so one mask is everybody's; a shorter request's padding
    is on the left.
    """
    reach = longest if window is None else min(longest, window)
    steps, columns = torch.arange(block_slots.shape[1]), torch.arange(-reach, block_slots.shape[1])
    context = gather_slots(req_to_token, rows, (lens.unsqueeze(1) + columns[:reach]).clamp_(min=0))
    slots = torch.cat((context, block_slots.to(context.dtype)), dim=1).view(-1)
    mask = additive(visible(steps, columns, causal=causal, window=window)) if causal or window is not None else None
    if shortest >= reach:
        return Keys(slots, mask)
    padding = additive(columns >= -lens.unsqueeze(1))[:, None, None]
    return Keys(slots, padding if mask is None else padding + mask)


def block_keys(
    req_to_token: Tensor,
    rows: list[int],
    lens: list[int],
    block_slots: Tensor,
    *,
    causal: bool,
    window: int | None,
    tree_mask: Tensor | None,
) -> list[Keys]:
    """Keys of a block of ``T`` tokens of each request: its context, then the block itself.

    Args:
        req_to_token: KV slots ``[requests, positions]`` int32.
        rows, lens: row and context length of each request, the block **not** included.
        block_slots: KV slots of the block ``[B, T]``.
        causal: verification is causal; the drafter's block is not (every position sees the whole block).
        window: sliding window, or None.
        tree_mask: flat bool ``[sum_b T * (lens[b] + T)]``, one ``[T, lens[b] + T]`` matrix per request
            after the other, which replaces the causal rule inside the block; None for a chain.
    """
    reach = [length if window is None else min(length, window) for length in lens]
    blocks = block_slots.to(req_to_token.dtype).unbind()
    slots = [
        torch.cat([req_to_token[row, length - read : length], block])
        for row, length, read, block in zip(rows, lens, reach, blocks, strict=True)
    ]
    if not causal and window is None:
        return [Keys(each, None) for each in slots]
    # Counted from the start of the block, the last ``C`` columns of the longest request's mask are everybody's.
    steps, columns = torch.arange(block_slots.shape[1]), torch.arange(-max(reach), block_slots.shape[1])
    allowed = visible(steps, columns, causal=causal and tree_mask is None, window=window)
    if tree_mask is None:
        mask = additive(allowed)
        return [Keys(each, mask[:, -each.shape[0] :]) for each in slots]
    sizes = [len(steps) * (length + len(steps)) for length in lens]
    trees = [tree.view(len(steps), -1) for tree in tree_mask.view(-1).to(torch.bool).split(sizes)]
    return [
        Keys(each, additive(allowed[:, -each.shape[0] :] & tree[:, -each.shape[0] :]))
        for each, tree in zip(slots, trees, strict=True)
    ]


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: Keys, *, batch: int, scale: float) -> Tensor:
    """Attention of ``T`` tokens of each of ``B`` requests over pool rows ``keys.slots``: ``q [B*T, H, D]``.

    Args:
        k_pool, v_pool: ``[slots, G, D]`` and ``[slots, G, Dv]``, any dtype that converts to that of ``q``.

    Returns:
        ``[B*T, H, Dv]``.
    """
    k = k_pool.index_select(0, keys.slots).float().view(batch, -1, *k_pool.shape[1:])
    v = v_pool.index_select(0, keys.slots).float().view(batch, -1, *v_pool.shape[1:])
    out = scaled_dot_product_attention(
        q.float().view(batch, -1, *q.shape[1:]).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=keys.mask,
        scale=scale,
        enable_gqa=q.shape[1] != k_pool.shape[1],
    )
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[1], -1).to(q.dtype)


def attend_blocks(q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: list[Keys], *, batch: int, scale: float) -> Tensor:
    """Attention of a block of ``T`` tokens of each request: ``q [B*T, H, D]`` to ``[B*T, H, Dv]``.

    Args:
        k_pool, v_pool: as in :func:`attend`.
        keys: of the whole batch, or of each request.
    """
    each = batch // len(keys)
    blocks = zip(q.chunk(len(keys)), keys, strict=True)
    parts = [attend(block, k_pool, v_pool, its_keys, batch=each, scale=scale) for block, its_keys in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def attend_prompt(
    q: Tensor, k: Tensor, v: Tensor, *, prefix: int, causal: bool, window: int | None, scale: float
) -> Tensor:
    """Attention of one request's prompt chunk over its prefix and itself.

    Args:
        q: queries of positions ``prefix .. prefix + T - 1``, ``[T, H, D]``.
        k, v: keys and values of the last ``C`` positions up to the end of the chunk, ``[C, G, D]``; ``C``
            may be less than ``prefix + T`` where a window makes the oldest unreadable.

    Returns:
        ``[T, H, Dv]``.
    """
    if prefix == 0 and causal and window is None:
        return _attend_tile(q, k, v, mask=None, causal=True, scale=scale)
    end = prefix + q.shape[0]
    first = end - k.shape[0]
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
        queries = q[start - prefix : stop - prefix]
        tiles.append(_attend_tile(queries, k[span], v[span], mask=mask, causal=False, scale=scale))
    return tiles[0] if len(tiles) == 1 else torch.cat(tiles)


def _attend_tile(q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
    out = scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0),
        k.transpose(0, 1).unsqueeze(0),
        v.transpose(0, 1).unsqueeze(0),
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)
