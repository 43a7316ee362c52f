"""Training blocks cut from rows of tokens, and the attention masks of a row that holds many of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.train.drafter import DrafterConfig, visible

BLOCK_SIZE = 16
# Drawn per block. Hiding the tail makes one drafter usable at each width.
VISIBLE_BLOCK_SIZES = torch.tensor([16, 16, 16, 8, 4])


@dataclass(frozen=True)
class Blocks:
    """Blocks cut from rows: anchors and widths [rows, n], tokens and learnable [rows, n, BLOCK_SIZE]."""

    anchors: Tensor
    tokens: Tensor
    learnable: Tensor
    widths: Tensor


def cut_blocks(ids: Tensor, weights: Tensor, n: int, generator: torch.Generator, width: int | None = None) -> Blocks:
    """Draw ``n`` anchors per row inside the answers; their blocks teach up to the answer's end.

    Args:
        ids: int64 [rows, length].
        weights: float32 [rows, length], 1.0 on answers.
        width: of all blocks; None draws each from ``VISIBLE_BLOCK_SIZES``.
    """
    answer = (weights == 1.0).float()
    can_start = answer[:, :-1] * answer[:, 1:]
    anchors = torch.multinomial(can_start + 1e-9, n, generator=generator)
    rows = torch.arange(len(ids))[:, None]
    tokens, in_answer = (F.pad(x, (0, BLOCK_SIZE - 1)).unfold(1, BLOCK_SIZE, 1)[rows, anchors] for x in (ids, answer))
    widths = VISIBLE_BLOCK_SIZES[torch.randint(len(VISIBLE_BLOCK_SIZES), anchors.shape, generator=generator)]
    widths = widths if width is None else torch.full_like(widths, width)
    learnable = in_answer.cumprod(-1).bool() & (torch.arange(BLOCK_SIZE) < widths[:, :, None])
    learnable[:, :, 0] = False  # the anchor is given
    return Blocks(anchors, tokens, learnable, widths)


def block_masks(config: DrafterConfig, blocks: Blocks, length: int) -> list[Tensor]:
    """Per layer, bool [rows, 1, n * B, length + n * B]: a block sees the context before it, and itself."""
    rows, n = blocks.anchors.shape
    offsets, context = torch.arange(BLOCK_SIZE), torch.arange(length)
    start = blocks.anchors[:, :, None, None]  # [rows, n, 1, 1], as the shapes below
    query = start + offsets[:, None]
    own = blocks.anchors[:, :, None] + offsets
    key = torch.cat((context.expand(rows, length), own.flatten(1)), dim=1)[:, None, None]
    same_block = torch.eye(n, dtype=torch.bool)[:, :, None] & (offsets < blocks.widths[:, :, None, None])
    allowed = torch.cat((context < start, same_block.flatten(2)[:, :, None]), dim=-1)
    return [
        (visible(layer_type, query, key, start, config.sliding_window) & allowed).flatten(1, 2)[:, None]
        for layer_type in config.layer_types
    ]
