"""A ragged verify: each request brings another number of positions, one request's after the other's.

Projections, norms, MLPs and experts run on those alone. Attention and the recurrent layers work on a block of T
positions a request: here the positions take their place in it, and their results leave it again. What stands in the
other places is read by none of them, since a place sees only those before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def rows_of(forward_batch: Any) -> Tensor | None:
    """int64 [N], the places of the batch's positions among B * T; None if each request has all T."""
    spec_info = forward_batch.spec_info
    layout = None if spec_info is None else spec_info.ragged_verify_layout
    if layout is None:
        return None
    return (torch.arange(spec_info.draft_token_num) < layout.verify_lens[:, None]).flatten().nonzero().squeeze(1)


def spread(x: Tensor, rows: Tensor, places: int) -> Tensor:
    """``x [N, ...]`` at ``rows`` of ``[places, ...]``, 0 elsewhere."""
    return x.new_zeros(places, *x.shape[1:]).index_copy_(0, rows, x)


def gdn_forward_extend(
    original: Callable[..., Tensor],
    self: Any,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    **others: Any,
) -> Tensor:
    """Around ``GDNAttnBackend.forward_extend``: a verify gets whole blocks.

    Args:
        mixed_qkv: ``[N, channels]``; a, b: ``[N, HV]``.

    Returns:
        ``[1, N, HV, V]``.
    """
    rows = rows_of(forward_batch)
    if rows is None:
        return original(self, layer, forward_batch, mixed_qkv, a, b, **others)
    places = forward_batch.batch_size * forward_batch.spec_info.draft_token_num
    inputs = (spread(x, rows, places) for x in (mixed_qkv, a, b))
    return original(self, layer, forward_batch, *inputs, **others)[:, rows]
