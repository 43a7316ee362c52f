"""The two forwards of a step: the drafter fills the block's mask positions, the target verifies the block."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import pad

from sglang_dflash.upstream import CaptureHiddenMode, draft_tp_context, prepare_mamba_track_for_verify
from sglang_dflash.worker.step import Step
from sglang_dflash.worker.window import DraftRings

if TYPE_CHECKING:
    from sglang_dflash.upstream import ModelRunner, TpModelWorker


class Draft:
    """The drafter's forward, eager or as a CUDA graph: SGLang's runner decides, the result is the same.

    Args:
        runner: the drafter's.
        layout: the parallel layout that the drafter was built for.
        rings: the drafter's slots under a draft window.
        widest: positions that the drafter drafts, anchor included.

    Attributes:
        broken: int64 [], drafted positions so far whose hidden state was not finite.
    """

    def __init__(self, runner: ModelRunner, layout: Any, rings: DraftRings | None, widest: int) -> None:
        self._runner, self._layout, self._rings, self._widest = runner, layout, rings, widest
        self.broken = torch.zeros((), dtype=torch.int64, device=runner.device)

    def __call__(self, step: Step) -> None:
        """Fill ``step.tokens``, ``step.margins`` and ``step.draft_kv``. A block of width 1 has nothing to draft.

        Beyond what the drafter drafts, its last draft stands, with a margin of minus infinity: any copy replaces it.
        """
        translator = self._runner.kv_index_translator
        if self._rings is not None:
            step.draft_kv = self._rings.view(step.target_kv, step.positions, step.batch, translator)
        if step.width == 1:
            return
        beyond = max(0, step.width - self._widest)
        drafted = step.first(self._widest, translator) if beyond else step
        forward_batch = drafted.forward_batch(self._runner, drafted.draft_kv, CaptureHiddenMode.NULL)
        with draft_tp_context(self._layout):
            output = self._runner.forward(forward_batch).logits_output
        # A graph pads the batch and owns the memory of its result: slice it and copy it.
        anchors, bs = step.tokens[:, :1], len(step.tokens)
        drafts = output.drafts[:bs]
        step.tokens = torch.cat((anchors, drafts, drafts[:, -1:].expand(-1, beyond)), dim=1)
        if output.margins is not None:
            step.margins = output.margins[:bs]
            if beyond:
                step.margins = pad(step.margins, (0, beyond), value=-inf)
        self.broken += output.broken[:bs].sum()


class Verify:
    """The target's forward over the block.

    Args:
        target_worker: the target's.
    """

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._target = target_worker

    def __call__(self, step: Step) -> None:
        """Fill ``step.verified``.

        Recurrent layers start from the committed state and leave it alone: they keep what each position writes until
        :mod:`sglang_dflash.states.commit` commits part of it. A block of the anchor alone is plain decoding and runs as
        that: the states advance in place.
        """
        # Leaves this step's snapshot slots on the batch, where the forward and SGLang's commit look for them.
        prepare_mamba_track_for_verify(step.batch)
        forward_batch = step.forward_batch(self._target.model_runner, step.target_kv, CaptureHiddenMode.FULL)
        step.verified = self._target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
