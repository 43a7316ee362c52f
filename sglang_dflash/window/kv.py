"""What one model's attention reads and writes for a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class BlockKV:
    """A block's place in the K/V pool of the target or the drafter.

    Attributes:
        width: positions of the block, anchor included.
        seq_lens: int64 [bs], context tokens that attention reads before the block.
        slots: int64 [bs * w], KV slots of the block's positions.
        plan: SGLang's plan of these slots; every forward and writer of the step uses it.
        host_lens: int64 [bs] on the host, KV length that attention reads, block included.
        host_lens_sum: its sum.
        exact: whether ``host_lens`` are the lengths; else they are upper bounds.
    """

    width: int
    seq_lens: Tensor
    slots: Tensor
    plan: Any
    host_lens: Tensor
    host_lens_sum: int
    exact: bool

    @classmethod
    def planned(
        cls,
        translator: Any,
        rows: Tensor,
        *,
        width: int,
        seq_lens: Tensor,
        slots: Tensor,
        host_lens: Tensor,
        host_lens_sum: int,
        exact: bool,
    ) -> BlockKV:
        """With SGLang's plan for it.

        Args:
            translator: the model's ``kv_index_translator``.
            rows: int64 [bs], ``req_pool_indices``.
        """
        plan = translator.plan(
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=host_lens,
            write_virtual=slots,
            read_extent=width,
        )
        return cls(width, seq_lens, slots, plan, host_lens, host_lens_sum, exact)
