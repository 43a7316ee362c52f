"""Draft: one drafter forward fills the block's mask positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from sglang_dflash.upstream import CaptureHiddenMode, draft_tp_context
from sglang_dflash.worker.step import Step


class Drafting:
    """The drafter's forward, eager or as a CUDA graph: SGLang's runner decides, the result is the same.

    Args:
        runner: the drafter's ``ModelRunner``.
        layout: the parallel layout that the drafter was built for.
    """

    def __init__(self, runner: Any, layout: Any) -> None:
        self._runner, self._layout = runner, layout

    @record_function("dflash.draft")
    def __call__(self, batch: Any, step: Step) -> Tensor:
        """The block to verify: int64 [bs, w], the anchor and one drafted token per mask position."""
        if step.width == 1:
            return step.block.tokens
        forward_batch = step.forward_batch(batch, self._runner, step.block.tokens, CaptureHiddenMode.NULL)
        with draft_tp_context(self._layout):
            drafts = self._runner.forward(forward_batch).logits_output.drafts
        return torch.cat((step.block.tokens[:, :1], drafts[: step.block.tokens.shape[0]]), dim=1)
