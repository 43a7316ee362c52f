"""SGLang plugin of the kit: stand-ins for what SGLang compiles at run time, and simulated accept lengths.

Our worker reads the variable that SGLang's own reads for simulated accept lengths (SGLANG_SIMULATE_ACC_LEN).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tools.gpu.standins.jit import load_jit

REPLACED: dict[str, Callable[..., Any]] = {
    "kernels.jit.utils.compile.loader.load_jit": load_jit,
    # Needs NVIDIA's CuTe DSL; without a mode the gate and up projections run separately.
    "srt.layers.dual_gemm.DualGemm._select_mode": lambda self, gate_up_proj, hidden_size: None,
    # SGLang's worker rehearses sampling with FlashInfer's kernels at start, unless they are unavailable.
    "srt.speculative.dflash_utils.is_dflash_sampling_verify_available": lambda: False,
}


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or 0) > 0:
        from sglang_dflash import ops

        ops.accept_block = simulated(ops.accept_block, _draw)  # before our worker is imported
    if os.environ.get("GPU_KIT_STAND_INS"):
        for target, replacement in REPLACED.items():
            HookRegistry.register(f"sglang.{target}", replacement, HookType.REPLACE)


def simulated(accept_block: Callable[..., Any], draw: Callable[[int], int]) -> Callable[..., Any]:
    """Wrap ``accept_block`` so that every row accepts ``draw(width)`` tokens, the bonus token included."""

    def run(draft: Tensor, target: Tensor, lens: Tensor, **options: Any) -> Any:
        length = draw(draft.shape[1])
        agreed = target.clone()
        agreed[:, : length - 1] = draft[:, 1:length]
        if length < draft.shape[1]:
            agreed[:, length - 1] = draft[:, length] ^ 1  # a token of the vocabulary that is not the draft
        return accept_block(draft, agreed, lens, **options)

    return run


def _draw(width: int) -> int:
    from sglang.srt.speculative import spec_utils

    return int(spec_utils.sample_simulated_acc_len(spec_utils.SIMULATE_ACC_LEN, spec_utils.SIMULATE_ACC_METHOD, width))
