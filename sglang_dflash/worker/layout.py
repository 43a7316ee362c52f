"""The layout of a step: its block, and SGLang's batches for the forwards over it."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_lora
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.spec_utils import record_stream_each
from sglang.srt.utils.common import async_h2d_stack
from torch import Tensor

from sglang_dflash.ops import prepare_block
from sglang_dflash.step.draft_state import DraftState
from sglang_dflash.step.step import BlockKV, GrammarBarrier, Step

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


class Layout:
    def __init__(self, target: ModelRunner, mask_token_id: int, state_table: Tensor | None) -> None:
        self._target, self._mask_token_id, self._state_table = target, mask_token_id, state_table

    def lay_out(self, batch: ScheduleBatch, width: int, grammar_barrier: GrammarBarrier | None) -> Step:
        state: DraftState = batch.spec_info
        # the scheduler's stream computes the lengths
        record_stream_each((batch.seq_lens,), torch.get_device_module(batch.seq_lens.device).current_stream())
        rows, table = batch.req_pool_indices, self._target.req_to_token_pool.req_to_token
        block = prepare_block(
            state.bonus_tokens,
            batch.seq_lens,
            rows,
            table,
            width=width,
            mask_token_id=self._mask_token_id,
            state_table=self._state_table,
        )
        slots = block.slots
        if state.slot_limits is not None:
            slots = torch.where(block.positions < state.slot_limits.repeat_interleave(width), slots, 0)
        batch.out_cache_loc = slots  # for a unified memory pool
        # without a host copy of the lengths, the reserved slots bound them
        lens_are_exact = batch.seq_lens_cpu is not None
        host_lens = batch.seq_lens_cpu + width if lens_are_exact else state.reserved_lens_cpu
        host_tokens = batch.seq_lens_sum + width * len(rows) if lens_are_exact else state.reserved_tokens
        assert host_lens is not None, "prepare_for_decode() has not run"
        kv = BlockKV(width, batch.seq_lens, slots, host_lens, host_tokens, lens_are_exact)
        kv = kv.planned(self._target.kv_index_translator, rows)
        return Step(
            batch=batch,
            state=state,
            width=width,
            grammar_barrier=grammar_barrier,
            positions=block.positions,
            tokens=block.tokens,
            target_kv=kv,
            draft_kv=kv,
            state_slots=block.state_slots,
        )


_SHARED = (
    *("req_pool_indices", "orig_seq_lens", "mamba_track_indices", "sampling_info", "spec_algorithm", "return_logprob"),
    *("top_logprobs_nums", "token_ids_logprobs", "can_run_decode_cuda_graph", "global_forward_mode"),
    *("is_extend_in_batch", "tbo_split_seq_index"),
)
_shared = attrgetter(*_SHARED)


class ForwardBatches:
    """Builds SGLang's batches for the forwards of ``runner`` over a block; width 1 is a plain decode.

    It copies a template, where ``ForwardBatch.init_new`` would derive every field at every call.
    """

    def __init__(self, runner: ModelRunner, capture: CaptureHiddenMode) -> None:
        self._runner, self._capture = runner, capture
        self._templates: dict[tuple[int, int], dict[str, Any]] = {}

    def __call__(self, step: Step, kv: BlockKV) -> ForwardBatch:
        batch, runner, width = step.batch, self._runner, step.width
        key = len(batch.reqs), width
        template = self._templates.get(key)
        if template is None:
            template = self._templates[key] = self._template(*key)
        tokens = step.tokens.flatten()
        forward_batch = ForwardBatch.__new__(ForwardBatch)
        fields = vars(forward_batch)
        fields.update(template)
        fields.update(zip(_SHARED, _shared(batch), strict=True))
        fields.update(
            input_ids=tokens,
            # Decode lengths include the new token; verify lengths exclude the block.
            seq_lens=kv.seq_lens + 1 if width == 1 else kv.seq_lens,
            seq_lens_cpu=kv.host_lens,
            seq_lens_sum=kv.host_tokens,
            positions=step.positions,
            mm_inputs=batch.multimodal_inputs,
        )
        kv.plan.bind(forward_batch, runner.kv_index_translator)
        if width > 1:
            fields["spec_info"] = DFlashVerifyInput(
                draft_token=tokens,
                positions=step.positions,
                draft_token_num=width,
                capture_hidden_mode=self._capture,
                kv_loc_plan=kv.plan,
            )
        if batch.global_num_tokens is not None and not runner.is_draft_worker:
            # all ranks' numbers of tokens; the drafter runs on the ranks that share this batch
            forward_batch.init_mlp_sync_metadata(batch, runner.device)
        if runner.model_config.model_is_mrope:
            fields["mrope_positions"] = rope_positions(step.positions, batch.multimodal_inputs)
        if (adapters := runner.lora_manager) is not None:
            forward_batch.lora_ids = [req.lora_id for req in batch.reqs]
            if not get_lora().enable_lora_overlap_loading:
                adapters.fetch_new_loras(set(forward_batch.lora_ids))
            adapters.prepare_lora_batch(forward_batch)
        return forward_batch

    def idle(self, batch: ScheduleBatch, width: int) -> ForwardBatch:
        none = torch.empty(0, dtype=torch.int64, device=self._runner.device)
        batch = copy.copy(batch)
        batch.spec_info = None
        if width > 1:
            batch.spec_info = DFlashVerifyInput(
                draft_token=none, positions=none, draft_token_num=width, capture_hidden_mode=self._capture
            )
        return ForwardBatch.init_new(
            batch, self._runner, capture_hidden_mode=self._capture, return_hidden_states_before_norm=False
        )

    def _template(self, batch_size: int, width: int) -> dict[str, Any]:
        device = self._runner.device
        none = torch.empty(batch_size * width, dtype=torch.int64, device=device)
        template = ForwardBatch(
            forward_mode=ForwardMode.DECODE if width == 1 else ForwardMode.TARGET_VERIFY,
            batch_size=batch_size,
            input_ids=none,
            req_pool_indices=none,
            seq_lens=none,
            out_cache_loc=none,
            seq_lens_sum=0,
            capture_hidden_mode=self._capture,
            contains_last_prefill_chunk=False,
        )
        template._init_num_token_non_padded(device=device, is_draft_worker=self._runner.is_draft_worker)
        return vars(template)


def rope_positions(positions: Tensor, inputs: Sequence[Any]) -> Tensor:
    """Return rotary positions of a block (M-RoPE): time, row and column, int64 [3, bs * w]; equal for text.

    An image takes as many positions as its longer side has tokens (Wang et al., 2024, Qwen2-VL, section 2.1). SGLang's
    own function synchronises.
    """
    if any(inputs):
        none = torch.zeros(1, dtype=torch.int64)
        distances = [none if each is None else each.mrope_position_delta.view(1) for each in inputs]
        block = positions.view(len(inputs), -1) + async_h2d_stack(distances, device=positions.device)
        positions = block.flatten()
    return positions.expand(3, -1)
