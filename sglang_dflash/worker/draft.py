"""Draft: one drafter forward fills the block's mask positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.upstream import CaptureHiddenMode, draft_tp_context
from sglang_dflash.window.rings import DraftRings
from sglang_dflash.worker.observe.traced import traced
from sglang_dflash.worker.step import Step


class Drafting:
    """The drafter's forward, eager or as a CUDA graph: SGLang's runner decides, the result is the same.

    Args:
        runner: the drafter's ``ModelRunner``.
        layout: the parallel layout that the drafter was built for.
        rings: the drafter's slots under a draft window.
    """

    def __init__(self, runner: Any, layout: Any, rings: DraftRings | None) -> None:
        self._runner, self._layout, self._rings = runner, layout, rings

    def view(self, batch: Any, step: Step) -> Step:
        """The step in the drafter's slots and lengths: the target's, unless there is a draft window."""
        if self._rings is None:
            return step
        return self._rings.view(step, batch.req_pool_indices, self._runner.kv_index_translator)

    @traced("dflash.draft")
    def __call__(self, batch: Any, step: Step) -> Tensor:
        """The block to verify: int64 [bs, w], the anchor and one drafted token per mask position.

        Args:
            step: the drafter's :meth:`view` of the step.
        """
        if step.width == 1:
            return step.block.tokens
        committed = batch.seq_lens
        forward_batch = step.forward_batch(batch, self._runner, step.block.tokens, CaptureHiddenMode.NULL)
        batch.seq_lens = committed
        with draft_tp_context(self._layout):
            drafts = self._runner.forward(forward_batch).logits_output.drafts
        return torch.cat((step.block.tokens[:, :1], drafts[: step.block.tokens.shape[0]]), dim=1)
