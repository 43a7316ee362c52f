"""Verify: one target forward over the drafted block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_dflash.upstream import CaptureHiddenMode, prepare_mamba_track_for_verify
from sglang_dflash.worker.step import Step

if TYPE_CHECKING:
    from sglang_dflash.upstream import TpModelWorker


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
