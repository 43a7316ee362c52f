"""One decode step as data: each stage reads what the stages before it filled in, and fills in its own part."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.ops import Accepted, prepare_block
from sglang_dflash.upstream import (
    CaptureHiddenMode,
    DFlashVerifyInput,
    ForwardBatch,
    ForwardMode,
    GenerationBatchResult,
    RaggedVerifyLayout,
    record_stream_each,
)
from sglang_dflash.window.kv import BlockKV
from sglang_dflash.worker.rope_positions import rope_positions
from sglang_dflash.worker.state import DraftState

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ScheduleBatch

# No token: in a block whose drafts were cut, equal to nothing that the target may choose there.
NOT_VERIFIED = -1


@dataclass
class Step:
    """A step's block, from its layout to what it commits; ``bs`` requests, ``w`` positions each.

    Attributes:
        batch: the scheduler's batch; ``seq_lens`` holds the committed lengths before the step.
        state: what the last step left.
        width: positions ``w`` of the block, anchor included; *cut* may lower it to what the longest row verifies.
        grammar_barrier: brings the grammars up to the last step's tokens (overlap scheduling); None without overlap.
        positions: int64 [bs * w], absolute positions of the block.
        tokens: int64 [bs, w], anchor and mask tokens; *draft* replaces the mask tokens.
        target_kv: where the target keeps the block's K/V.
        draft_kv: where the drafter keeps them: in the same place unless there is a draft window.
        confidence: from *draft*: float32 [bs, w - 1], the drafter's probability of each draft, if it gives them.
        verify_lens: from *cut*: verified positions of each request, anchor included; None if all are.
        laid_out: from *cut*: int64 [N], the verified ones among the block's positions as laid out; None for all.
        rows: from *cut*: int64 [N], the verified ones among the bs * w positions that are left; None for all.
        grammar_tree: from *accept*, before verify: the block on its way to the host, for grammars; None without one.
        verified: from *verify*: SGLang's ``GenerationBatchResult`` of the target, with logits [bs * w, V] and the
            captured hidden states [bs * w, K * H].
        accepted: from *accept*: the tokens that the step commits.
    """

    batch: ScheduleBatch
    state: DraftState
    width: int
    grammar_barrier: Callable[[], None] | None
    positions: Tensor
    tokens: Tensor
    target_kv: BlockKV
    draft_kv: BlockKV
    confidence: Tensor | None = None
    verify_lens: list[int] | None = None
    laid_out: Tensor | None = None
    rows: Tensor | None = None
    grammar_tree: Any = None
    verified: Any = field(init=False)
    accepted: Accepted = field(init=False)

    @classmethod
    def lay_out(
        cls,
        batch: ScheduleBatch,
        width: int,
        grammar_barrier: Callable[[], None] | None,
        *,
        runner: ModelRunner,
        mask_token_id: int,
    ) -> Step:
        """Place the next block of every request after its committed tokens.

        Args:
            runner: the target's, whose KV slots the block takes.
        """
        state = batch.spec_info
        # The lengths were gathered on the scheduler's stream.
        record_stream_each((batch.seq_lens,), torch.get_device_module(batch.seq_lens.device).current_stream())
        block = prepare_block(
            state.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            runner.req_to_token_pool.req_to_token,
            width=width,
            mask_token_id=mask_token_id,
        )
        # The scheduler tells a unified memory pool which slots this step writes, and reads them here.
        batch.out_cache_loc = block.slots
        # The lengths are on the host if an attention backend asks for them; else the reserved slots bound them.
        exact = batch.seq_lens_cpu is not None
        host_lens, host_lens_sum = state.reserved_lens_cpu, state.reserved_lens_sum
        if exact:
            host_lens = batch.seq_lens_cpu + width
            host_lens_sum = batch.seq_lens_sum + width * batch.batch_size()
        assert host_lens is not None, "prepare_for_decode() has not run"
        kv = BlockKV.planned(
            runner.kv_index_translator,
            batch.req_pool_indices,
            width=width,
            seq_lens=batch.seq_lens,
            slots=block.slots,
            host_lens=host_lens,
            host_lens_sum=host_lens_sum,
            exact=exact,
        )
        return cls(batch, state, width, grammar_barrier, block.positions, block.tokens, kv, kv)

    def cut(self, lens: Sequence[int]) -> None:
        """Verify only the first ``lens`` positions of each request, 1..w; before the target's forward."""
        kept = torch.arange(self.width) < torch.tensor(lens)[:, None]
        positions = self.positions.view_as(kept)
        self.width, self.verify_lens = max(lens), list(lens)
        self.laid_out = _indices(kept)
        self.positions, kept = positions[:, : self.width].flatten(), kept[:, : self.width]
        self.tokens = self.tokens[:, : self.width].where(kept, NOT_VERIFIED)
        self.rows = None if min(lens) == self.width else _indices(kept)

    def forward_batch(self, runner: ModelRunner, kv: BlockKV, capture: CaptureHiddenMode) -> ForwardBatch:
        """SGLang's batch for a forward of ``runner`` over the block, a plain decode if the block is the anchor alone.

        Args:
            kv: the block in the runner's pool.
            capture: FULL for the target (hidden states of ``target_layer_ids``), NULL for the drafter.
        """
        decodes = self.width == 1
        batch = copy.copy(self.batch)  # the forward's own: the scheduler's batch keeps its fields
        batch.forward_mode = ForwardMode.DECODE if decodes else ForwardMode.TARGET_VERIFY
        batch.input_ids = self.of_verified(self.tokens.flatten())
        batch.out_cache_loc = kv.slots
        # A decode counts its own token, a verify does not count its block.
        batch.seq_lens = kv.seq_lens + 1 if decodes else kv.seq_lens
        batch.seq_lens_cpu, batch.seq_lens_sum = kv.host_lens, kv.host_lens_sum
        batch.spec_info = DFlashVerifyInput(
            draft_token=batch.input_ids,
            positions=self.positions,
            draft_token_num=self.width,
            capture_hidden_mode=capture,
            kv_loc_plan=kv.plan,
            ragged_verify_layout=self._ragged_layout(),
        )
        sees_images = runner.model_config.model_is_mrope
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=capture,
            return_hidden_states_before_norm=False,
            spec_mrope_positions=rope_positions(self.positions, batch.multimodal_inputs) if sees_images else None,
            kv_loc_plan=kv.plan,
            write_cols=self.laid_out,
        )
        if self.rows is not None:
            forward_batch.positions = forward_batch.positions[self.rows]
            if forward_batch.mrope_positions is not None:
                forward_batch.mrope_positions = forward_batch.mrope_positions[:, self.rows]
        if decodes:
            forward_batch.spec_info = None  # the positions were taken from it; attention backends take it for a draft's
        return forward_batch

    def of_verified(self, values: Tensor) -> Tensor:
        """Of values [bs * w], those at positions that are verified."""
        return values if self.rows is None else values[self.rows]

    def _ragged_layout(self) -> RaggedVerifyLayout | None:
        """Where each request's verified positions lie in the target's forward, as SGLang's backends want to know it."""
        if self.rows is None or self.verify_lens is None:
            return None
        return ragged_layout(self.verify_lens, self.tokens.device)

    def result(self, *, counted: bool = False) -> GenerationBatchResult:
        """What the scheduler takes from the step. The hidden states stay behind, or it would copy them to the host.

        Args:
            counted: whether SGLang is to count verified positions, as it must if widths differ.
        """
        cap_lens = None
        if counted:
            bs, device = len(self.tokens), self.tokens.device
            cap_lens = torch.full((bs,), self.width, device=device)
            if self.verify_lens is not None:
                cap_lens = torch.tensor(self.verify_lens, device=device)
        accepted, output = self.accepted, self.verified.logits_output
        output.hidden_states = None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.out_tokens.flatten(),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DraftState(accepted.bonus, accepted.new_seq_lens),
            speculative_num_draft_tokens=self.width,
            cap_lens=cap_lens,
            can_run_cuda_graph=self.verified.can_run_cuda_graph,
            routed_experts_output=self.verified.routed_experts_output,
            indexer_topk_output=self.verified.indexer_topk_output,
        )


def ragged_layout(verify_lens: Sequence[int], device: torch.device) -> RaggedVerifyLayout:
    """Of requests that verify so many positions each, one after the other."""
    lens = torch.tensor(verify_lens, dtype=torch.int32, device=device)
    bounds = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    return RaggedVerifyLayout(
        verify_lens=lens, graph_num_tokens=sum(verify_lens), extend_start_loc=bounds[:-1], qo_indptr_device=bounds
    )


def _indices(kept: Tensor) -> Tensor:
    """int64 [N], where bool ``kept`` [bs, w] is true, counted through its rows."""
    return kept.flatten().nonzero().squeeze(1)
