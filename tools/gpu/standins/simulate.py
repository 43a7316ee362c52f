"""Simulated accept lengths in our worker, set by the variable that SGLang's own reads (SGLANG_SIMULATE_ACC_LEN)."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

SWITCH = "SGLANG_SIMULATE_ACC_LEN"


def install() -> None:
    """Force accept lengths if the variable is set. Call before our worker is imported."""
    if float(os.environ.get(SWITCH) or 0) > 0:
        from sglang_dflash import ops

        ops.accept_block = simulated(ops.accept_block, lambda width: _draw(width))


def simulated(accept_block: Any, draw: Any) -> Any:
    """Wrap ``accept_block`` so that every row accepts ``draw(width)`` tokens, the bonus token included."""

    def run(draft: Tensor, target: Tensor, lens: Tensor) -> Any:
        length = draw(draft.shape[1])
        agreed = target.clone()
        agreed[:, : length - 1] = draft[:, 1:length]
        if length < draft.shape[1]:
            agreed[:, length - 1] = draft[:, length] ^ 1  # a token of the vocabulary that is not the draft
        return accept_block(draft, agreed, lens)

    return run


def _draw(width: int) -> int:
    from sglang.srt.speculative import spec_utils

    return int(spec_utils.sample_simulated_acc_len(spec_utils.SIMULATE_ACC_LEN, spec_utils.SIMULATE_ACC_METHOD, width))
