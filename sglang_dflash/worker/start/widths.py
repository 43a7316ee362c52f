"""Prepare an adaptive server: graphs for its widths, their measured costs, and the width policy.

The measured batches consist of the pools' padding row with a short context. They lack the scheduler's time between
steps, which the cost table learns from real steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.ops import host_rows
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import (
    CaptureHiddenMode,
    DFlashVerifyInput,
    ForwardBatch,
    ForwardMode,
    draft_tp_context,
    get_parallel,
)
from sglang_dflash.width import CostTable, WidthPolicy, build_policy
from sglang_dflash.worker.start.graphs import WidthGraphs

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)

CONTEXT = 64
REPEATS = 5  # the first one warms up


def batch_sizes(most: int) -> list[int]:
    """Return the powers of four below the largest batch size, and that size."""
    return [*(4**k for k in range(most.bit_length()) if 4**k < most), most]


class Calibration:
    """Times a step's two forwards and its injection.

    Args:
        target: the target's runner; drafter: the drafter's.
        layout: the drafter's parallel layout.
        mask_token_id: fills the batches; any token id works.
        graphs: resources of each width.
    """

    def __init__(
        self, target: ModelRunner, drafter: ModelRunner, layout: Any, mask_token_id: int, graphs: WidthGraphs
    ) -> None:
        self._target, self._drafter, self._layout, self._token = target, drafter, layout, mask_token_id
        self._graphs = graphs
        self._device = torch.get_device_module(target.device)

    def points(self, widths: Sequence[int], most_requests: int) -> dict[tuple[int, int], float]:
        """Return milliseconds by (batch size, width)."""
        if torch.device(self._target.device).type == "cpu":
            self._compile_products(widths[-1], most_requests)
        return {
            (batch_size, width): self._milliseconds(batch_size, width)
            for batch_size in batch_sizes(most_requests)
            for width in widths
        }

    @torch.inference_mode()
    def _compile_products(self, width: int, most_requests: int) -> None:
        # Run each number of rows once, so that no request waits for oneDNN to compile.
        sizes = {host_rows(batch_size * width): batch_size for batch_size in range(1, most_requests + 1)}
        for batch_size in sizes.values():
            with self._graphs.at(width):
                self._step(batch_size, width)

    @torch.inference_mode()
    def _milliseconds(self, batch_size: int, width: int) -> float:
        taken = []
        for _ in range(REPEATS):
            self._device.synchronize()
            start = time.perf_counter()
            with self._graphs.at(width):
                self._step(batch_size, width)
            self._device.synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken[1:]) * 1000

    def _step(self, batch_size: int, width: int) -> None:
        if width > 1:
            drafted = min(width, self._graphs.drafted)
            with draft_tp_context(self._layout):
                self._drafter.forward(self._batch(self._drafter, batch_size, drafted, CaptureHiddenMode.NULL))
        batch = self._batch(self._target, batch_size, width, CaptureHiddenMode.FULL)
        output = self._target.forward(batch).logits_output
        output.next_token_logits.argmax(-1)
        hidden = output.hidden_states[: len(batch.positions)]
        if width > 1:  # plain decoding injects the tokens of many steps together
            with draft_tp_context(self._layout):
                self._drafter.model.context_kv(hidden, batch.positions)

    def _batch(self, runner: ModelRunner, batch_size: int, width: int, capture: CaptureHiddenMode) -> ForwardBatch:
        device, tokens = runner.device, batch_size * width
        decodes = width == 1
        lens = torch.full((batch_size,), CONTEXT + decodes, dtype=torch.int64, device=device)
        host_lens = torch.full((batch_size,), CONTEXT + width, dtype=torch.int64)
        positions = (CONTEXT + torch.arange(width, device=device)).repeat(batch_size)
        block = DFlashVerifyInput(
            draft_token=None, positions=positions, draft_token_num=width, capture_hidden_mode=capture
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.TARGET_VERIFY,
            batch_size=batch_size,
            input_ids=torch.full((tokens,), self._token, dtype=torch.int64, device=device),
            req_pool_indices=torch.zeros(batch_size, dtype=torch.int64, device=device),
            seq_lens=lens,
            seq_lens_cpu=host_lens,
            seq_lens_sum=int(host_lens.sum()),
            orig_seq_lens=lens,
            out_cache_loc=torch.zeros(tokens, dtype=torch.int64, device=device),
            positions=positions,
            mrope_positions=positions.expand(3, -1),
            spec_algorithm=runner.spec_algorithm,
            spec_info=None if decodes else block,
            capture_hidden_mode=capture,
        )
        runner.kv_index_translator.bind_runner_slots(batch)
        return batch


def prepare_widths(
    plan: ServingPlan, target: ModelRunner, drafter: ModelRunner, layout: Any
) -> tuple[WidthPolicy, WidthGraphs]:
    """Capture graphs for the plan's widths and build the policy; all ranks use the costs of rank 0.

    Args:
        target, drafter: the runners; their own graphs are captured.
        layout: the drafter's parallel layout.
    """
    assert plan.widths is not None
    graphs, config = WidthGraphs(target, drafter, layout, plan.drafted), plan.widths
    config = replace(config, widths=graphs.build(config.widths_for(plan.block, plan.drafted)))
    costs = None
    if config.policy == "adaptive":
        calibration = Calibration(target, drafter, layout, plan.drafter.mask_token_id, graphs)
        points = calibration.points(config.widths, target.max_running_requests)
        costs = CostTable(get_parallel().tp_group.broadcast_object(points), config.widths)
    if get_parallel().tp_rank == 0:
        logger.info("DFLASH: policy %s, widths %s; %s", config.policy, config.widths, costs or "no cost table")
    return build_policy(config, plan.block, costs, plan.drafted), graphs
