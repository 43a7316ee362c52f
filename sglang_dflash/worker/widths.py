"""Adaptive width in the worker: graphs of every width, and costs measured at start-up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.published import accept_lengths, card_of_drafter
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
from sglang_dflash.width.survival import PRIOR, constant_hazard
from sglang_dflash.worker.start.graphs import WidthGraphs

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)

CONTEXT = 64
REPEATS = 5  # the first one warms up


def prepare_widths(
    plan: ServingPlan, target: ModelRunner, drafter: ModelRunner, layout: Any
) -> tuple[WidthPolicy, WidthGraphs]:
    """Capture graphs for the plan's widths and build the policy; all ranks use the costs of rank 0."""
    assert plan.widths is not None
    graphs, config = WidthGraphs(target, drafter, layout, plan.drafted), plan.widths
    config = replace(config, widths=graphs.build(config.widths_for(plan.block, plan.drafted)))
    costs = None
    if config.policy == "adaptive":
        points = Calibration(graphs, plan.drafter.mask_token_id).points(config.widths, target.max_running_requests)
        costs = CostTable(get_parallel().tp_group.broadcast_object(points), config.widths)
    if get_parallel().tp_rank == 0:
        logger.info("DFLASH: policy %s, widths %s; %s", config.policy, config.widths, costs or "no cost table")
    prior = expected_hazard(plan.files.name, plan.drafted)
    return build_policy(config, plan.block, costs, plan.drafted, prior), graphs


def expected_hazard(drafter: str, block: int) -> float:
    """Return the hazard of a draft that the drafter's card implies by its mean accept length, else the default."""
    card = card_of_drafter(drafter)
    near, lengths = accept_lengths(card, block) if card else (block, {})
    return constant_hazard(mean(lengths.values()), near) if lengths else PRIOR


def batch_sizes(most: int) -> list[int]:
    """Return the powers of four below the largest batch size, and that size."""
    return [*(4**k for k in range(most.bit_length()) if 4**k < most), most]


class Calibration:
    """Times a step's two forwards and its injection, on batches of the pools' padding row with a short context.

    They lack the scheduler's time between steps, which the cost table learns from real steps.
    """

    def __init__(self, graphs: WidthGraphs, token_id: int) -> None:
        self._graphs, self._token_id = graphs, token_id  # of any token

    def points(self, widths: Sequence[int], most_requests: int) -> dict[tuple[int, int], float]:
        """Return milliseconds by (batch size, width)."""
        if torch.device(self._graphs.target.device).type == "cpu":
            # Run each number of rows once, so that no request waits for oneDNN to compile.
            sizes = {host_rows(bs * widths[-1]): bs for bs in range(1, most_requests + 1)}
            for bs in sizes.values():
                self._step(bs, widths[-1])
        return {(bs, width): self._milliseconds(bs, width) for bs in batch_sizes(most_requests) for width in widths}

    def _milliseconds(self, bs: int, width: int) -> float:
        device, taken = torch.get_device_module(self._graphs.target.device), []
        for _ in range(REPEATS):
            device.synchronize()
            start = time.perf_counter()
            self._step(bs, width)
            device.synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken[1:]) * 1000

    @torch.inference_mode()
    def _step(self, bs: int, width: int) -> None:
        with self._graphs.at(width):
            if width > 1:
                drafted = min(width, self._graphs.drafted)
                with draft_tp_context(self._graphs.layout):
                    self._graphs.drafter.forward(self._batch(self._graphs.drafter, bs, drafted, CaptureHiddenMode.NULL))
            batch = self._batch(self._graphs.target, bs, width, CaptureHiddenMode.FULL)
            output = self._graphs.target.forward(batch).logits_output
            output.next_token_logits.argmax(-1)
            # Plain decoding injects the tokens of many steps together; staged ones are part of the drafter's forward.
            if width > 1 and self._graphs.drafter.model.staged is None:
                with draft_tp_context(self._graphs.layout):
                    self._graphs.drafter.model.context_kv(output.hidden_states[: bs * width], batch.positions)

    def _batch(self, runner: ModelRunner, bs: int, width: int, capture: CaptureHiddenMode) -> ForwardBatch:
        decodes, device = width == 1, runner.device
        lens = torch.full((bs,), CONTEXT + decodes, dtype=torch.int64, device=device)
        positions = (CONTEXT + torch.arange(width, device=device)).repeat(bs)
        block = DFlashVerifyInput(
            draft_token=None, positions=positions, draft_token_num=width, capture_hidden_mode=capture
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=torch.full_like(positions, self._token_id),
            req_pool_indices=torch.zeros_like(lens),
            seq_lens=lens,
            seq_lens_cpu=torch.full((bs,), CONTEXT + width, dtype=torch.int64),
            seq_lens_sum=bs * (CONTEXT + width),
            orig_seq_lens=lens,
            out_cache_loc=torch.zeros_like(positions),
            positions=positions,
            mrope_positions=positions.expand(3, -1),
            spec_algorithm=runner.spec_algorithm,
            spec_info=None if decodes else block,
            capture_hidden_mode=capture,
        )
        runner.kv_index_translator.bind_runner_slots(batch)
        return batch
