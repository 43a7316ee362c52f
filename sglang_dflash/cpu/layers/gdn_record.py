"""What a verify keeps of every block position for the commit: the write to the state, not the state.

SGLang's buffer has room for a whole state ``[V, K]`` after every position. A state is a sum of outer products
(see :mod:`gdn_block`), so its terms are enough: a position's write u, its key k, and how far the writes up to it
and the state before the block have decayed by then, ``V + K + block + 1`` numbers. The commit adds up the one
state that it needs. To store them all cost more than the rest of the verify.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_dflash.cpu.layers.gdn_block import Block


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
