"""State between two decode steps, and the reservation of KV slots for the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
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

    With overlap scheduling only ``future_indices``, rows of the scheduler's relay buffers, follows the batch through
    filter and merge. The scheduler refills ``bonus_tokens`` (int64 [bs], anchors of the next block) and
    ``batch.seq_lens`` before each step.

    Args:
        in_flight: width of the step that returned this state; with overlap, ``committed_cpu`` lacks its tokens.

    Attributes:
        committed_cpu: committed lengths on the host, one step late with overlap.
        reserved_lens_cpu: int32 [bs] on the host, lengths with KV slots.
        reserved_tokens: sum of ``reserved_lens_cpu``.
    """

    # Relayed for other algorithms; unused by DFLASH.
    topk_p = topk_index = hidden_states = None
    num_tokens_per_req = num_tokens_for_logprob_per_req = 1

    def __init__(
        self, bonus_tokens: Tensor, new_seq_lens: Tensor, in_flight: int, future_indices: Tensor | None = None
    ) -> None:
        super().__init__(SpecInputType.DFLASH_DRAFT)
        self.bonus_tokens, self.new_seq_lens, self.future_indices = bonus_tokens, new_seq_lens, future_indices
        self.in_flight, self.reserved_tokens = in_flight, 0
        self.committed_cpu: list[int] = []
        self.reserved_lens_cpu: Tensor | None = None

    def prepare_for_decode(self, batch: ScheduleBatch) -> None:
        """Reserve KV slots for the next step; runs on the scheduler's stream.

        A step needs a full block beyond the committed lengths, which may exceed the host's by the step in flight. If
        slots are missing, reserve two full blocks, so that plain steps allocate rarely. Slots past the accepted tokens
        are not freed: the next block is written there.
        """
        if batch.batch_size() == 0:
            return
        batch.maybe_evict_swa()
        self.committed_cpu = [req.kv.kv_committed_len for req in batch.reqs]
        page_size = batch.token_to_kv_pool_allocator.page_size
        blocks = get_alloc_reserve_per_decode()
        for reserve in (blocks // 2 + self.in_flight, blocks):
            current, reserved, missing = page_aligned_decode_alloc_lens(
                batch.reqs, reserve=reserve, page_size=page_size
            )
            if not missing or reserve == blocks:
                break
        # Near the context limit the two reserved blocks can exceed the slot table: clamp. Every token that can still be
        # committed fits, and positions past the table get the padding slot.
        columns = batch.req_to_token_pool.req_to_token.shape[1]
        if missing:
            reserved = [min(length, columns) for length in reserved]
        self.reserved_tokens = sum(reserved)
        on_host = _host_tensor([current, reserved], np.int32)
        self.reserved_lens_cpu = on_host[1]
        if missing := self.reserved_tokens - sum(current):
            lens = async_h2d(on_host.numpy(), dtype=torch.int32, device=batch.device)
            alloc_for_spec_decode(
                batch.tree_cache,
                batch.req_to_token_pool,
                reqs=batch.reqs,
                req_pool_indices=batch.req_pool_indices,
                cur_kv_lens=lens[0],
                cur_kv_lens_cpu=on_host[0],
                nxt_kv_lens=lens[1],
                nxt_kv_lens_cpu=self.reserved_lens_cpu,
                num_needed_tokens=missing,
                batch=batch,
            )
        for req in batch.reqs:
            req.decode_batch_idx += 1
        batch.seq_lens_cpu = _host_tensor(self.committed_cpu, np.int64)
        batch.seq_lens_sum = sum(self.committed_cpu)

    def filter_batch(self, new_indices: Tensor, new_indices_cpu: list[int] | None = None) -> None:
        for name in self._following():
            setattr(self, name, getattr(self, name)[new_indices])

    def merge_batch(self, other: DraftState) -> None:
        for name in self._following():
            setattr(self, name, torch.cat((getattr(self, name), getattr(other, name))))
        self.in_flight = max(self.in_flight, other.in_flight)

    def _following(self) -> tuple[str, ...]:
        return ("bonus_tokens", "new_seq_lens") if self.future_indices is None else ("future_indices",)


def _host_tensor(values: Any, dtype: Any) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype))  # a third of the time of torch.tensor
