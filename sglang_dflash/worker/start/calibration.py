"""The policy of an adaptive width, with costs that the worker's own steps show at the start."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_dflash.ops import host_rows
from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream.worker import get_parallel
from sglang_dflash.width import AdaptiveWidth, CostTable, RandomWidth, WidthPolicy

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner

logger = logging.getLogger(__name__)

REPEATS = 5  # the first one warms up


def width_policy(
    plan: ServingPlan, widths: tuple[int, ...], target: ModelRunner, step: Callable[[int, int], None]
) -> WidthPolicy:
    """Build the policy; all ranks use the costs of rank 0.

    Args:
        widths: those that have graphs, ascending.
        step: runs a dummy step of a batch size and a width.
    """
    assert plan.widths is not None
    costs = None
    policy = WidthPolicy(widths[-1])
    if plan.widths.policy == "random":
        policy = RandomWidth(*widths, seed=plan.widths.seed)
    elif plan.widths.policy == "adaptive":
        costs = CostTable(get_parallel().tp_group.broadcast_object(step_times(target, widths, step)))
        policy = AdaptiveWidth(costs, plan.drafted)
    if get_parallel().tp_rank == 0:
        logger.info("DFLASH: policy %s, widths %s; %s", plan.widths.policy, widths, costs or "no cost table")
    return policy


def batch_sizes(most: int) -> list[int]:
    """Return the powers of four below the largest batch size, and that size."""
    return [*(4**k for k in range(most.bit_length()) if 4**k < most), most]


def step_times(
    target: ModelRunner, widths: tuple[int, ...], step: Callable[[int, int], None]
) -> dict[tuple[int, int], float]:
    """Return milliseconds of a step by batch size and width.

    They lack the scheduler's time between steps, which the cost table learns from real steps.
    """
    most = target.max_running_requests
    if torch.device(target.device).type == "cpu":
        # Run each number of rows once, so that no request waits for oneDNN to compile.
        for bs in {host_rows(bs * widths[-1]): bs for bs in range(1, most + 1)}.values():
            step(bs, widths[-1])
    device = torch.get_device_module(target.device)

    def milliseconds(bs: int, width: int) -> float:
        taken = []
        for _ in range(REPEATS):
            device.synchronize()
            start = time.perf_counter()
            step(bs, width)
            device.synchronize()
            taken.append(time.perf_counter() - start)
        return min(taken[1:]) * 1000

    return {(bs, width): milliseconds(bs, width) for bs in batch_sizes(most) for width in widths}
