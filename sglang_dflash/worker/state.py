"""State between two decode steps, and the reservation of KV slots for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.upstream import (
    SpecInput,
    SpecInputType,
    alloc_for_spec_decode,
    async_h2d,
    get_alloc_reserve_per_decode,
    page_aligned_decode_alloc_lens,
)

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch


class DraftState(SpecInput):
    """SGLang's ``batch.spec_info`` between steps.

    With overlap scheduling only ``future_indices`` follows the batch through filter and merge. The scheduler relays the
    values through its buffers, and refills ``bonus_tokens`` and ``batch.seq_lens`` before each step.

    Attributes:
        bonus_tokens: int64 [bs], anchors of the next block.
        new_seq_lens: int64 [bs], committed lengths.
        future_indices: rows of the scheduler's relay buffers; None without overlap.
        committed_cpu: committed lengths on the host, one step late with overlap; empty before
            :meth:`prepare_for_decode`.
        reserved_lens_cpu: int32 [bs] on the host, lengths with KV slots: upper bounds of what the step reads; None
            before :meth:`prepare_for_decode`.
    """

    # Relayed for other algorithms; unused by DFLASH.
    topk_p = topk_index = hidden_states = None
    num_tokens_per_req = num_tokens_for_logprob_per_req = 1

    def __init__(self, bonus_tokens: Tensor, new_seq_lens: Tensor) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.bonus_tokens = bonus_tokens
        self.new_seq_lens = new_seq_lens
        self.future_indices: Tensor | None = None
        self.committed_cpu: list[int] = []
        self.reserved_lens_cpu: Tensor | None = None
        self.reserved_lens_sum = 0

    @classmethod
    def idle(cls, device: torch.device | str) -> DraftState:
        """Return the state of an empty batch."""
        return cls(*(torch.empty(0, dtype=torch.int64, device=device) for _ in range(2)))

    @classmethod
    def transferred(cls, stock: Any) -> DraftState:
        """Convert the state that SGLang made for its own worker, for requests that another server prefilled."""
        state = cls(stock.bonus_tokens, stock.new_seq_lens)
        state.future_indices = stock.future_indices
        return state

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step; runs on the scheduler's stream.

        With overlap the host's committed lengths lag one step, so reserve two full blocks beyond them. Slots past the
        accepted tokens are not freed: the next block is written there.
        """
        if batch.batch_size() == 0:
            return
        batch.maybe_evict_swa()
        committed = [req.kv.kv_committed_len for req in batch.reqs]
        current, reserved, _ = page_aligned_decode_alloc_lens(
            batch.reqs,
            reserve=get_alloc_reserve_per_decode(),
            page_size=batch.token_to_kv_pool_allocator.page_size,
        )
        # Near the context limit the two reserved blocks can exceed the slot table: clamp. Every token that can still be
        # committed fits, and positions past the table get the padding slot.
        columns = batch.req_to_token_pool.req_to_token.shape[1]
        reserved = [min(length, columns) for length in reserved]
        missing = sum(reserved) - sum(current)
        if missing:
            lens = async_h2d([current, reserved], dtype=torch.int32, device=batch.device)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=lens[0],
                cur_kv_lens_cpu=torch.tensor(current, dtype=torch.int32),
                nxt_kv_lens=lens[1],
                nxt_kv_lens_cpu=torch.tensor(reserved, dtype=torch.int32),
                num_needed_tokens=missing,
                batch=batch,
            )
        for req in batch.reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = torch.tensor(committed, dtype=torch.int64)
        batch.seq_lens_sum = sum(committed)
        self.committed_cpu = committed
        self.reserved_lens_cpu = torch.tensor(reserved, dtype=torch.int32)
        self.reserved_lens_sum = sum(reserved)

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        """Keep the requests at ``new_indices``."""
        if self.future_indices is not None:
            self.future_indices = self.future_indices[new_indices]
        else:
            self.bonus_tokens = self.bonus_tokens[new_indices]
            self.new_seq_lens = self.new_seq_lens[new_indices]

    def merge_batch(self, other: DraftState) -> None:
        """Append another batch's requests."""
        if self.future_indices is not None:
            assert other.future_indices is not None
            self.future_indices = torch.cat((self.future_indices, other.future_indices))
        else:
            self.bonus_tokens = torch.cat((self.bonus_tokens, other.bonus_tokens))
            self.new_seq_lens = torch.cat((self.new_seq_lens, other.new_seq_lens))
