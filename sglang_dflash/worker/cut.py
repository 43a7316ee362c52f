"""Cut: drafts that the drafter itself calls hopeless are not verified."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.ops import confident_lens
from sglang_dflash.worker.step import Step

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch


def cut(step: Step, threshold: float, least: float = 1) -> None:
    """Cut each request's block where the product of the drafter's probabilities falls below ``threshold``.

    The lengths are read on the host, which costs nothing where the host computed them. Whatever is cut, the tokens are
    the target's: a cut decides how many of them a step brings.

    Args:
        threshold: of the width policy (:meth:`~sglang_dflash.width.policy.WidthPolicy.cut`); 0 cuts nothing.
        least: positions that must be left out in all, or nothing is cut.
    """
    if threshold > 0 and step.confidence is not None and _rows_are_alike(step.batch):
        lens = confident_lens(step.confidence, threshold).tolist()
        if len(lens) * step.width - sum(lens) >= max(least, 1):
            step.cut(lens)


def _rows_are_alike(batch: ScheduleBatch) -> bool:
    """Whether every row of the block is sampled by itself; what walks a block from row to row wants all of them."""
    info = batch.sampling_info
    walked = batch.has_grammar or batch.return_logprob or info.has_custom_logit_processor
    return not walked and info.acc_additive_penalties is None and info.logit_bias is None
