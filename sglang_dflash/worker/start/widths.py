"""Prepare an adaptive server: graphs for its widths, their measured costs, and the policy that chooses between them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import get_parallel
from sglang_dflash.width import CostTable, WidthPolicy, build_policy
from sglang_dflash.worker.start.calibrate import Calibration
from sglang_dflash.worker.start.graphs import WidthGraphs

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner

logger = logging.getLogger(__name__)


def prepare_widths(
    plan: ServingPlan, target: ModelRunner, drafter: ModelRunner, layout: Any
) -> tuple[WidthPolicy, WidthGraphs]:
    """Provide the widths that the plan asks for, with costs measured on rank 0 and used on every rank.

    Args:
        target, drafter: the runners, their own graphs captured.
        layout: the parallel layout that the drafter was built for.
    """
    assert plan.widths is not None
    graphs, config = WidthGraphs(target, drafter, layout), plan.widths
    config = replace(config, widths=graphs.build(config.widths_for(plan.block)))
    costs = None
    if config.policy == "adaptive":
        calibration = Calibration(target, drafter, layout, plan.drafter.mask_token_id, graphs)
        points = calibration.points(config.widths, target.max_running_requests)
        costs = CostTable.calibrated(get_parallel().tp_group.broadcast_object(points), config.widths)
    if get_parallel().tp_rank == 0:
        logger.info("DFLASH: policy %s, widths %s; %s", config.policy, config.widths, costs or "no cost table")
    return build_policy(config, plan.block, costs), graphs
