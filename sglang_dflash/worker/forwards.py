"""Draft and verify: the drafter's forward replaces the mask tokens, the target's forward verifies the block."""

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
    """The drafter's forward; SGLang's runner runs it eagerly or as a CUDA graph.

    Args:
        runner: the drafter's.
        layout: the drafter's parallel layout.
        rings: the drafter's KV slots under a draft window.
        widest: the drafter's block size, anchor included.

    Attributes:
        broken: int64 [], number of drafted positions so far whose hidden state was not finite.
    """

    def __init__(self, runner: ModelRunner, layout: Any, rings: DraftRings | None, widest: int) -> None:
        self._runner, self._layout, self._rings, self._widest = runner, layout, rings, widest
        self.broken = torch.zeros((), dtype=torch.int64, device=runner.device)

    def __call__(self, step: Step) -> None:
        """Fill ``step.tokens``, ``step.margins`` and ``step.draft_kv``; a block of width 1 gets ``draft_kv`` only.

        Past the drafter's block, repeat its last draft with margin -inf so that any copy replaces it.
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
        # A graph pads the batch and overwrites its outputs at the next replay: slice and copy.
        anchors, bs = step.tokens[:, :1], len(step.tokens)
        drafts = output.drafts[:bs]
        step.tokens = torch.cat((anchors, drafts, drafts[:, -1:].expand(-1, beyond)), dim=1)
        if output.margins is not None:
            step.margins = output.margins[:bs]
            if beyond:
                step.margins = pad(step.margins, (0, beyond), value=-inf)
        self.broken += output.broken[:bs].sum()


class Verify:
    """The target's forward over the block."""

    def __init__(self, target_worker: TpModelWorker) -> None:
        self._target = target_worker

    def __call__(self, step: Step) -> None:
        """Fill ``step.verified``.

        Recurrent layers start from the committed state without changing it, and record what each position writes;
        :mod:`sglang_dflash.states.commit` commits the accepted part. A block of the anchor alone runs as plain
        decoding, which advances the states in place.
        """
        # Stores this step's snapshot slots on the batch; the forward and SGLang's commit read them there.
        prepare_mamba_track_for_verify(step.batch)
        forward_batch = step.forward_batch(self._target.model_runner, step.target_kv, CaptureHiddenMode.FULL)
        step.verified = self._target.forward_batch_generation(batch=None, forward_batch=forward_batch, is_verify=True)
