"""The drafter's CUDA graphs: captured by SGLang's graph runner, replayed without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

if TYPE_CHECKING:
    from sglang_dflash.step.step import Step

INPUTS = "input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens"


class DraftGraphs(DecodeCudaGraphRunner):
    """Graphs of one width. Our attention reads lengths and slots on the device, so a replay needs one copy and no plan.

    The graphs read :data:`INPUTS`, int64 [bs * w] and [bs], in memory that no other runner writes, so a verify can be
    planned before the draft. Rows past the batch are zeros: row and slot 0, an empty context. SGLang's runner serves
    where graphs have segments.
    """

    def capture(self) -> None:
        if isinstance(self.backend, BreakableCudaGraphBackend):
            self.__class__ = DecodeCudaGraphRunner
            self.capture()
            return
        shapes = *(((self.max_bs, self.captured_req_width),) * 3), *(((self.max_bs,),) * 2)
        self._inputs = [torch.zeros(shape, dtype=torch.int64, device=self.device) for shape in shapes]
        self._of_batch = [[each[:bs] for each in self._inputs] for bs in range(self.max_bs + 1)]
        self._used = 0  # requests of the last batch
        super().capture()

    def capture_prepare(self, size: int, *args: Any, **kwargs: Any) -> Any:
        batch, *others = super().capture_prepare(size, *args, **kwargs)
        vars(batch).update(zip(INPUTS, (each.view(-1) for each in self._of_batch[size]), strict=True))
        self.model_runner.kv_index_translator.bind_runner_slots(batch)
        return batch, *others

    def replay(self, step: Step, size: int) -> Any:
        """Return the ``DraftOutput`` of the graph of ``size`` requests for the first positions of the step's blocks.

        It is valid until the next graph runs.
        """
        bs, kv = len(step.tokens), step.draft_kv
        if bs < self._used:
            torch._foreach_zero_([each[bs : self._used] for each in self._inputs])
        self._used = bs
        block = [each.view(bs, -1)[:, : self.captured_req_width] for each in (step.tokens, step.positions, kv.slots)]
        torch._foreach_copy_(self._of_batch[bs], [*block, step.batch.req_pool_indices, kv.seq_lens])
        return self.backend.replay(self._make_graph_key(size), None)
