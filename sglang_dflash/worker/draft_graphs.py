"""The drafter's CUDA graphs, replayed without a graph runner of SGLang.

The drafter attends by lengths and slots on the device, so a replay needs one copy and no metadata.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.distributed.parallel_state import graph_capture
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.runner import set_global_graph_memory_pool
from sglang.srt.model_executor.runner.base_cuda_graph_runner import freeze_gc
from sglang.srt.model_executor.runner.shape_key import ShapeKey
from sglang.srt.model_executor.runner_backend.utils import resolve_decode_backend
from sglang.srt.model_executor.runner_utils.capture_mode import model_capture_mode
from sglang.srt.model_executor.runner_utils.pool import get_or_create_global_graph_capture_stream
from sglang.srt.runtime_context import get_exec, get_parallel
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.utils.common import get_available_gpu_memory
from torch import Tensor

from sglang_dflash.model.drafter import DraftOutput
from sglang_dflash.plan.settings import ONE_FORWARD_SWITCH

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.step.step import Step

logger = logging.getLogger(__name__)

PHASE = "draft_decode"  # SGLang's name


class DraftGraphs:
    """Graphs of blocks of one width for ascending batch ``sizes``. Build it and capture among the drafter's ranks.

    They read tokens, positions and slots of the blocks, int64 [bs, w], and rows and lengths, int64 [bs], from memory
    that is padded with zeros: row and slot 0, a context of no token.
    """

    def __init__(self, drafter: ModelRunner, width: int, sizes: Sequence[int]) -> None:
        # SGLang's capture reads these
        self.model_runner, self.captured_req_width = drafter, width
        self.device_module = torch.get_device_module(drafter.device)
        self.sizes, most = sizes, sizes[-1]
        shapes = *((most, width),) * 3, *((most,),) * 2
        self._inputs = [torch.zeros(shape, dtype=torch.int64, device=drafter.device) for shape in shapes]
        self._of_batch = [[each[:bs] for each in self._inputs] for bs in range(most + 1)]
        self._used = 0  # requests of the last batches, whose inputs are not padding
        self._backend = resolve_decode_backend(self)  # SGLang's pool, warm-up and memory saver

    def capture(self) -> bool:
        """Capture all sizes, the largest first; return whether every rank could. A failure is only logged."""
        drafter, stream = self.model_runner, get_or_create_global_graph_capture_stream()
        free = get_available_gpu_memory(drafter.device, drafter.gpu_id)
        with (
            model_capture_mode(),
            freeze_gc(get_exec().graph.enable_cudagraph_gc),
            graph_capture(stream=stream),  # with the collectives of the drafter's ranks
            self._backend.capture_session(stream),
        ):
            captured = all(map(self._capture, reversed(self.sizes)))
        if not captured:
            self._backend.cleanup()
            set_global_graph_memory_pool(None)  # the failed capture may still record into it
        free -= get_available_gpu_memory(drafter.device, drafter.gpu_id)
        drafter.graph_memory_usage[PHASE] = max(free, drafter.graph_memory_usage.get(PHASE, 0.0))
        return captured

    def _capture(self, size: int) -> bool:
        error: RuntimeError | None = None
        try:
            self._backend.capture_one(ShapeKey(size), partial(self._forward, self._batch(size)))
        except RuntimeError as raised:  # also out of memory
            error = raised
        errors = [each for each in get_parallel().tp_group.all_gather_object(error and str(error)) if each]
        if errors and get_parallel().tp_rank == 0:
            logger.warning(
                "DFLASH: SGLang's graph runner serves the drafter: capturing a graph for %d blocks of %d failed: %s. "
                "Fix: unset %s, and report it",
                *(size, self.captured_req_width, errors[0], ONE_FORWARD_SWITCH),
            )
        return not errors

    def _batch(self, size: int) -> ForwardBatch:
        *block, rows, lengths = self._of_batch[size]
        tokens, positions, slots = (each.flatten() for each in block)
        batch = ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=size,
            input_ids=tokens,
            req_pool_indices=rows,
            seq_lens=lengths,
            out_cache_loc=slots,
            seq_lens_sum=0,
            positions=positions,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            spec_info=DFlashVerifyInput(tokens, positions, self.captured_req_width),
        )
        self.model_runner.kv_index_translator.bind_runner_slots(batch)
        return batch

    def _forward(self, batch: ForwardBatch) -> Any:
        with forward_context(ForwardContext(attn_backend=self.model_runner.attn_backend), forward_batch=batch):
            return self.model_runner.model.forward(batch.input_ids, batch.positions, batch)

    def padded(self, bs: int) -> int:
        """Return the size of the graph that drafts for ``bs`` requests."""
        return self.sizes[bisect_left(self.sizes, bs)]

    def replay(self, step: Step) -> DraftOutput:
        """Draft the first positions of the step's blocks; valid until the next graph runs."""
        bs, width, kv = len(step.tokens), self.captured_req_width, step.draft_kv
        if bs < self._used:
            torch._foreach_zero_([each[bs : self._used] for each in self._inputs])
        self._used = bs
        block: list[Tensor] = [step.tokens, step.positions.view(bs, -1), kv.slots.view(bs, -1)]
        if step.width > width:
            block = [each[:, :width] for each in block]
        torch._foreach_copy_(self._of_batch[bs], [*block, step.batch.req_pool_indices, kv.seq_lens])
        output: DraftOutput = self._backend.replay(ShapeKey(self.padded(bs)), None)
        return output
