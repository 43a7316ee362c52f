"""One decode step's block: what it holds, where its KV goes, how far its attention may read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sglang_dflash.ops import Block, prepare_block
from sglang_dflash.upstream import CaptureHiddenMode, DFlashVerifyInput, ForwardBatch, ForwardMode
from sglang_dflash.worker.state import DraftState


@dataclass(frozen=True)
class Step:
    """The block of one step, shared by the draft forward, the target's verification and the injection.

    Attributes:
        width: positions of the block, anchor included.
        seq_lens: int64 [bs], context tokens that the step's attention reads before the block.
        block: anchor and mask tokens, positions and KV slots.
        kv_loc_plan: SGLang's plan of the step's KV slots; every forward and writer of the step uses it.
        host_lens: int [bs] on the host, an upper bound of the KV length that the step's attention reads.
        host_lens_sum: its sum.
    """

    width: int
    seq_lens: Tensor
    block: Block
    kv_loc_plan: Any
    host_lens: Tensor
    host_lens_sum: int

    @classmethod
    def lay_out(cls, batch: Any, state: DraftState, runner: Any, width: int, mask_token_id: int) -> Step:
        """Place the next block of every request behind its committed tokens.

        Args:
            batch: SGLang's ``ScheduleBatch``; ``seq_lens`` holds the committed lengths.
            runner: the target's ``ModelRunner``, whose KV slots the block takes.
        """
        block = prepare_block(
            state.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            runner.req_to_token_pool.req_to_token,
            width=width,
            mask_token_id=mask_token_id,
        )
        # Without lengths on the host (no attention backend asks for them) the reserved slots are the bound.
        host_lens, host_lens_sum = state.reserved_lens_cpu, state.reserved_lens_sum
        if batch.seq_lens_cpu is not None:
            host_lens = batch.seq_lens_cpu + width
            host_lens_sum = batch.seq_lens_sum + width * batch.batch_size()
        assert host_lens is not None, "prepare_for_decode() has not run"
        plan = runner.kv_index_translator.plan(
            req_pool_indices=batch.req_pool_indices,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=host_lens,
            write_virtual=block.slots,
            read_extent=width,
        )
        return cls(width, batch.seq_lens, block, plan, host_lens, host_lens_sum)

    def forward_batch(self, batch: Any, runner: Any, tokens: Tensor, capture: CaptureHiddenMode) -> Any:
        """SGLang's batch for a forward of ``runner`` over the block.

        Args:
            batch: the ``ScheduleBatch``; the scheduler restores it after the step, so its fields are scratch.
            tokens: int64 [bs, w].
            capture: FULL for the target (hidden states of ``target_layer_ids``), NULL for the drafter.
        """
        batch.forward_mode = ForwardMode.TARGET_VERIFY
        batch.input_ids = tokens.flatten()
        batch.out_cache_loc = self.block.slots
        batch.seq_lens = self.seq_lens
        batch.seq_lens_cpu = self.host_lens
        batch.seq_lens_sum = self.host_lens_sum
        batch.spec_info = DFlashVerifyInput(
            draft_token=batch.input_ids,
            positions=self.block.positions,
            draft_token_num=self.width,
            capture_hidden_mode=capture,
            kv_loc_plan=self.kv_loc_plan,
        )
        return ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=capture,
            return_hidden_states_before_norm=False,
            kv_loc_plan=self.kv_loc_plan,
        )
