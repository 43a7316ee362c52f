"""Launch every kernel that steps use outside CUDA graphs once at start-up.

Triton compiles and loads a kernel at its first launch. Under load that blocks all requests for seconds, and loading may
run out of memory. Triton compiles a kernel again for other dtypes, another 16-byte alignment of a tensor, None for a
tensor, integers that are 1 or divisible by 16, and other constexprs. The calls below cover those of steps:

- layout, accept, penalties, seeded draws and copies, at each width of a step;
- context K/V, by one call, because the number of tokens makes no difference;
- the slots that SGLang reserves for a step, for each power of two of batch sizes and each alignment of its inputs;
- the commit with and without a snapshot for the prefix cache, and the snapshot of a step of width 1 for each power of
  two of batch sizes.

Draft and verify run at graph capture, filters in the largest sampling step (:mod:`.sampling`). The kernels of grammars,
prefills and paged allocators are SGLang's and start as late under SGLang's own worker; its warm-up request runs most.

The calls use the pools' padding request, row 0 and slot 0, which accepts no token, so that no state changes.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash.ops import Accepted, accept_block, penalize_block, prepare_block, seeded_draw
from sglang_dflash.ops.dispatch import runs_kernels
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.states.commit import RecurrentCommit
from sglang_dflash.upstream import ForwardMode, assign_req_to_token_pool_func, get_exec, get_schedule, mamba_track_grid
from sglang_dflash.worker.copies import Copies
from sglang_dflash.worker.forwards import Inject

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)


class FirstCalls:
    """Runs the calls, through the worker's stages where a stage chooses the kernel.

    Args:
        plan: the serving plan.
        target: the target's runner; pools allocated, graphs captured.
        commit, copies, inject: stages of the worker.
    """

    def __init__(
        self, plan: ServingPlan, target: ModelRunner, commit: RecurrentCommit, copies: Copies | None, inject: Inject
    ) -> None:
        self._plan, self._target, self._commit, self._copies, self._inject = plan, target, commit, copies, inject
        self._table = target.req_to_token_pool.req_to_token

    @torch.no_grad()
    def run(self, widths: Sequence[int], at_width: Callable[[int], AbstractContextManager[Any]]) -> None:
        """Run all calls at ``widths``; do nothing where operations run as torch.

        Args:
            at_width: context that sets up forwards and commits for a width.
        """
        if not runs_kernels(self._table):
            return
        start = time.perf_counter()
        self._context_kv()
        self._choices()
        if self._plan.role != "prefill":
            self._slots()
        for width in widths:
            self._block(self._step(width))
            if self._plan.role != "prefill":
                with at_width(width):
                    self._commits(width)
        torch.get_device_module(self._table.device).synchronize()
        logger.info("DFLASH: loaded the kernels outside CUDA graphs in %.1f s", time.perf_counter() - start)

    def _context_kv(self) -> None:
        drafter, tokens = self._plan.drafter, self._zeros(self._plan.block)
        captured = len(drafter.target_layer_ids) * drafter.hidden_size
        hidden = torch.zeros(len(tokens), captured, dtype=self._target.dtype, device=tokens.device)
        self._inject.write(hidden, None, tokens, tokens)

    def _choices(self) -> None:
        row, neutral = self._zeros(1), torch.tensor([[0.0, 0.0, 1.0]], device=self._table.device)
        logits = torch.zeros(1, 1, self._target.model_config.vocab_size, device=self._table.device)
        penalize_block(logits, row[:, None], logits[0].int(), row, neutral)
        seeded_draw(logits[0], row, row)

    def _slots(self) -> None:
        for size in self._powers_of_two(1):
            rows, lens, slots = self._zeros(size), self._zeros(size + 1).int(), self._zeros(2)
            for ends, taken in itertools.product((lens[:size], lens[1:]), (slots[:1], slots[1:])):
                assign_req_to_token_pool_func(rows, self._table, lens[:size], ends, taken, size)

    def _powers_of_two(self, first: int) -> list[int]:
        # Enough batch sizes, from ``first`` on, where SGLang rounds them up to a power of two.
        most = self._target.max_running_requests
        return sorted({min(first << doublings, most) for doublings in range(most.bit_length() + 1)})

    def _block(self, step: Any) -> None:
        rows, lens, mask_token_id = step.batch.req_pool_indices, step.batch.seq_lens, self._plan.drafter.mask_token_id
        prepare_block(rows, lens, rows, self._table, width=step.width, mask_token_id=mask_token_id)
        accept_block(step.tokens, step.tokens, lens)
        if self._copies is not None:
            if step.width > 1:
                self._copies.offer(step)
            self._copies.append(step)

    def _commits(self, width: int) -> None:
        if width > 1 and not self._plan.replay and self._target.decode_cuda_graph_runner is None:
            return  # SGLang's commit of kept states needs a verify's buffers: the warm-up request runs it first
        tracks, sizes = get_exec().mamba.enable_mamba_extra_buffer, self._powers_of_two(16) if width == 1 else [1]
        for tracked, size in itertools.product((False, True) if tracks else (False,), sizes):
            step = self._step(width, size, mamba_track_grid(get_schedule().page_size) - 1 if tracked else 0)
            step.batch.mamba_track_indices = step.batch.req_pool_indices - 1 if tracked else None
            self._commit.before_verify(step)
            self._commit(step)

    def _step(self, width: int, size: int = 1, committed: int = 0) -> Any:
        # ``size`` padding requests of ``committed`` tokens that accept nothing.
        rows = self._zeros(size)
        lens, tokens = rows + committed, self._zeros(size, width)
        batch = SimpleNamespace(
            reqs=[None] * size,
            req_pool_indices=rows,
            seq_lens=lens,
            forward_mode=ForwardMode.TARGET_VERIFY,
            tree_cache=SimpleNamespace(page_size=get_schedule().page_size),
        )
        return SimpleNamespace(
            batch=batch,
            width=width,
            tokens=tokens,
            margins=torch.zeros(size, width - 1, device=rows.device),
            state=SimpleNamespace(committed_cpu=[committed] * size),
            accepted=Accepted(tokens, rows.int(), rows, lens),
        )

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._table.device)
