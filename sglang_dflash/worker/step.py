"""One decode step as data, and its first stage: the layout of the block.

Each stage reads fields that earlier stages filled, and fills others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
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
    async_h2d_stack,
    record_stream_each,
)
from sglang_dflash.worker.state import DraftState

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, ScheduleBatch

Publish = Callable[[Tensor], None]  # takes the committed lengths after a step, int64 [bs]
GrammarBarrier = Callable[[], None]


@dataclass(frozen=True)
class BlockKV:
    """KV slots and lengths of a block in the pool of the target or the drafter.

    Attributes:
        width: positions of the block, anchor included.
        seq_lens: int64 [bs], context tokens that attention reads before the block.
        slots: int64 [bs * w], KV slots of the block's positions.
        host_lens: int64 [bs] on the host, KV lengths that attention reads, block included.
        host_lens_sum: sum of ``host_lens``.
        exact: whether ``host_lens`` are exact; otherwise they are upper bounds.
        plan: SGLang's plan of these slots, shared by every forward and write of the step.
    """

    width: int
    seq_lens: Tensor
    slots: Tensor
    host_lens: Tensor
    host_lens_sum: int
    exact: bool
    plan: Any = None

    def planned(self, translator: Any, rows: Tensor) -> BlockKV:
        """Add SGLang's plan.

        Args:
            translator: the model's ``kv_index_translator``.
            rows: int64 [bs], ``req_pool_indices``.
        """
        plan = translator.plan(
            req_pool_indices=rows,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.host_lens,
            write_virtual=self.slots,
            read_extent=self.width,
        )
        return replace(self, plan=plan)

    def first(self, width: int, translator: Any, rows: Tensor) -> BlockKV:
        """Return the first ``width`` positions; arguments as for :meth:`planned`."""
        fewer = self.width - width
        kept = replace(
            self,
            width=width,
            slots=self.slots.view(-1, self.width)[:, :width].flatten(),
            host_lens=self.host_lens - fewer,
            host_lens_sum=self.host_lens_sum - fewer * len(rows),
        )
        return kept.planned(translator, rows)


@dataclass
class Step:
    """The block of a step, from layout to commit: ``bs`` requests, ``w`` positions each.

    Attributes:
        batch: the scheduler's batch; ``seq_lens`` holds the committed lengths before the step.
        state: left by the last step.
        width: positions ``w`` of the block, anchor included.
        grammar_barrier: commits the last step's tokens to the grammars; None without overlap.
        positions: int64 [bs * w], absolute positions of the block.
        tokens: int64 [bs, w], anchor and mask tokens; *draft* replaces the mask tokens.
        target_kv: the block in the target's pool.
        draft_kv: the block in the drafter's pool; equals ``target_kv`` without a draft window.
        margins: from *draft*: float32 [bs, w - 1], logit margin of each draft if blocks are copied, else None. The next
            run of the drafter overwrites it.
        grammar_tree: from *accept*, before verify: the block as copied to the host; None without grammars.
        state_slots: from *commit*, before verify: int64 [bs], slots of the recurrent states of a hybrid target.
        verified: from *verify*: SGLang's ``GenerationBatchResult`` of the target, with logits [bs * w, V] and the
            captured hidden states [bs * w, K * H].
        accepted: from *accept*: the tokens that the step commits.
    """

    batch: ScheduleBatch
    state: DraftState
    width: int
    grammar_barrier: GrammarBarrier | None
    positions: Tensor
    tokens: Tensor
    target_kv: BlockKV
    draft_kv: BlockKV
    margins: Tensor | None = None
    grammar_tree: Any = None
    state_slots: Tensor = field(init=False)
    verified: Any = field(init=False)
    accepted: Accepted = field(init=False)

    def first(self, width: int, translator: Any) -> Step:
        """Return the first ``width`` positions, for a drafter whose block is narrower."""
        return replace(
            self,
            width=width,
            positions=self.positions.view(-1, self.width)[:, :width].flatten(),
            tokens=self.tokens[:, :width],
            draft_kv=self.draft_kv.first(width, translator, self.batch.req_pool_indices),
        )

    def forward_batch(self, runner: ModelRunner, kv: BlockKV, capture: CaptureHiddenMode) -> ForwardBatch:
        """Return SGLang's batch for a forward of ``runner`` over the block; width 1 is a plain decode.

        Args:
            kv: the block in the runner's pool.
            capture: FULL for the target (hidden states of ``target_layer_ids``), NULL for the drafter.
        """
        decodes = self.width == 1
        batch = copy.copy(self.batch)  # the scheduler's batch keeps its fields
        batch.forward_mode = ForwardMode.DECODE if decodes else ForwardMode.TARGET_VERIFY
        batch.input_ids = self.tokens.flatten()
        batch.out_cache_loc = kv.slots
        # Decode lengths include the new token; verify lengths exclude the block.
        batch.seq_lens = kv.seq_lens + 1 if decodes else kv.seq_lens
        batch.seq_lens_cpu, batch.seq_lens_sum = kv.host_lens, kv.host_lens_sum
        batch.spec_info = DFlashVerifyInput(
            draft_token=batch.input_ids,
            positions=self.positions,
            draft_token_num=self.width,
            capture_hidden_mode=capture,
            kv_loc_plan=kv.plan,
        )
        sees_images = runner.model_config.model_is_mrope
        forward_batch = ForwardBatch.init_new(
            batch,
            runner,
            capture_hidden_mode=capture,
            return_hidden_states_before_norm=False,
            spec_mrope_positions=rope_positions(self.positions, batch.multimodal_inputs) if sees_images else None,
            kv_loc_plan=kv.plan,
        )
        if decodes:
            # Only needed to compute positions; backends would treat the batch as a draft.
            forward_batch.spec_info = None
        return forward_batch

    def result(self, *, counted: bool = False) -> GenerationBatchResult:
        """Return the scheduler's view of the step, without the hidden states, which it would copy to the host.

        Args:
            counted: whether SGLang must count verified positions, because widths differ between steps.
        """
        accepted, output = self.accepted, self.verified.logits_output
        output.hidden_states = None
        return GenerationBatchResult(
            logits_output=output,
            next_token_ids=accepted.out_tokens.flatten(),
            accept_lens=accepted.accept_lens,
            new_seq_lens=accepted.new_seq_lens,
            next_draft_input=DraftState(accepted.bonus, accepted.new_seq_lens),
            speculative_num_draft_tokens=self.width,
            cap_lens=torch.full_like(accepted.new_seq_lens, self.width) if counted else None,
            can_run_cuda_graph=self.verified.can_run_cuda_graph,
            routed_experts_output=self.verified.routed_experts_output,
            indexer_topk_output=self.verified.indexer_topk_output,
        )


def idle_result(batch: ScheduleBatch, block: int) -> GenerationBatchResult:
    """Return the scheduler's view of a step of an empty batch; ``block`` is the server's block size."""
    state = DraftState.idle(batch.seq_lens.device)
    return GenerationBatchResult(
        next_token_ids=state.bonus_tokens,
        accept_lens=state.bonus_tokens.int(),
        new_seq_lens=state.new_seq_lens,
        next_draft_input=state,
        speculative_num_draft_tokens=block,
    )


class Layout:
    """Lays out the next block of every request after its committed tokens.

    Args:
        runner: the target's; the block uses its KV slots.
        mask_token_id: the drafter's.
    """

    def __init__(self, runner: ModelRunner, mask_token_id: int) -> None:
        self._runner, self._mask_token_id = runner, mask_token_id

    def __call__(self, batch: ScheduleBatch, width: int, grammar_barrier: GrammarBarrier | None) -> Step:
        """Return a step of ``width`` positions per request."""
        state: DraftState = batch.spec_info
        # The scheduler's stream computed the lengths.
        record_stream_each((batch.seq_lens,), torch.get_device_module(batch.seq_lens.device).current_stream())
        block = prepare_block(
            state.bonus_tokens,
            batch.seq_lens,
            batch.req_pool_indices,
            self._runner.req_to_token_pool.req_to_token,
            width=width,
            mask_token_id=self._mask_token_id,
        )
        # The scheduler passes these slots to a unified memory pool.
        batch.out_cache_loc = block.slots
        # The lengths are on the host if an attention backend needs them; else the reserved slots bound them.
        exact = batch.seq_lens_cpu is not None
        host_lens, host_lens_sum = state.reserved_lens_cpu, state.reserved_lens_sum
        if exact:
            host_lens = batch.seq_lens_cpu + width
            host_lens_sum = batch.seq_lens_sum + width * batch.batch_size()
        assert host_lens is not None, "prepare_for_decode() has not run"
        kv = BlockKV(width, batch.seq_lens, block.slots, host_lens, host_lens_sum, exact)
        kv = kv.planned(self._runner.kv_index_translator, batch.req_pool_indices)
        return Step(batch, state, width, grammar_barrier, block.positions, block.tokens, kv, kv)


def rope_positions(positions: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Return rotary positions of a block (M-RoPE): time, row and column, int64 [3, bs * w]; equal for text.

    An image takes as many positions as its longer side has tokens, so positions of the text after it are lower by a
    distance (Wang et al., 2024, Qwen2-VL, section 2.1), which SGLang computes with the prompt. SGLang's function copies
    the distances from pageable memory, which would make the host wait at each step.

    Args:
        positions: int64 [bs * w], positions in the sequence.
        inputs: SGLang's ``MultimodalInputs`` of each request; None for text.
    """
    if any(each is not None for each in inputs):
        none = torch.zeros(1, dtype=torch.int64)
        distances = [none if each is None else each.mrope_position_delta.view(1) for each in inputs]
        block = positions.view(len(inputs), -1) + async_h2d_stack(distances, device=positions.device)
        positions = block.flatten()
    return positions.repeat(3, 1)
