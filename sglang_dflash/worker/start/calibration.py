"""The policy of an adaptive width, with costs measured at the start by the worker's own steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

import torch
from sglang.srt.runtime_context import get_parallel

from sglang_dflash.launch.plan import ServingPlan
from sglang_dflash.ops import host_rows
from sglang_dflash.width import AdaptiveWidth, CostTable, WidthPolicy
from sglang_dflash.worker.start import since_start, timed

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

REPEATS = 5
SHARE = 0.1  # share of the start-up time
Cell = tuple[int, int]  # batch size and width


@timed("calibration")
def width_policy(
    plan: ServingPlan, widths: tuple[int, ...], target: ModelRunner, step: Callable[[int, int], None]
) -> WidthPolicy:
    """Build the policy; all ranks use the costs of rank 0.

    ``widths`` have graphs; ``step`` runs a dummy step of a batch size and a width.
    """
    if plan.widths is None or plan.role == "prefill":
        return WidthPolicy(widths[-1])
    costs = CostTable(get_parallel().tp_group.broadcast_object(step_times(target, widths, step)))
    return AdaptiveWidth(costs, plan.drafter_width)


def batch_sizes(most: int) -> list[int]:
    return [*(4**k for k in range(most.bit_length()) if 4**k < most), most]


def step_times(
    target: ModelRunner, widths: tuple[int, ...], step: Callable[[int, int], None]
) -> dict[tuple[int, int], float]:
    """Return milliseconds of a step by batch size and width: the fastest of several, after a warm-up.

    The narrowest and widest blocks, and all of one request, are always measured; once ``SHARE`` of the start is used,
    the rest is :func:`extrapolated`. Steps are collective, so rank 0 decides.
    """
    most, widest, seconds = target.max_running_requests, widths[-1], since_start() * SHARE / (1 - SHARE)
    cells = [(bs, width) for bs in batch_sizes(most) for width in widths]
    cells.sort(key=lambda cell: (cell[0] > 1, widths[0] < cell[1] < widest, cell))
    # compile all of oneDNN's kernels before the first request
    numbers = range(1, most + 1) if torch.device(target.device).type == "cpu" else ()
    compiled = {host_rows(bs * widest): (bs, widest) for bs in numbers}.values()
    device, group = torch.get_device_module(target.device), get_parallel().tp_group
    taken, deadline = dict[Cell, list[float]](), time.perf_counter() + seconds
    twice = [cell for cell in cells for _ in range(2)]  # a warm-up and a time
    required = 2 * len(widths) + 4  # all blocks of one request, the narrowest and widest of the next batch size
    for number, cell in enumerate([*twice, *compiled, *cells * (REPEATS - 2)]):
        if number >= required and not group.broadcast_object(time.perf_counter() < deadline):
            break
        device.synchronize()
        start = time.perf_counter()
        step(*cell)
        device.synchronize()
        taken.setdefault(cell, []).append((time.perf_counter() - start) * 1000)
    return extrapolated(cells, {cell: min(each[1:]) for cell, each in taken.items() if len(each) > 1})


def extrapolated(cells: list[Cell], taken: Mapping[Cell, float]) -> dict[Cell, float]:
    """Return the milliseconds of all cells. Times that ``taken`` lacks grow with the rows as the widest blocks do."""
    widest, largest = max(width for _, width in cells), max(taken, key=prod)
    slope = max(0.0, taken[largest] - taken[1, widest]) / max(1, prod(largest) - widest)
    line = {cell: taken[1, widest] + slope * (prod(cell) - widest) for cell in cells}
    return {cell: taken.get(cell, max(line[cell], taken[1, cell[1]])) for cell in cells}
