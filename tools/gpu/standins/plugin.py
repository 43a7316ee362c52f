"""SGLang plugin of the kit: stand-ins for what SGLang compiles at run time, and simulated accept lengths."""

from __future__ import annotations

import os
from typing import Any

from tools.gpu.standins import jit, simulate


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    simulate.install()
    if os.environ.get("GPU_KIT_DEVICE") == "cpu":
        return  # the CPU platform calls none of them
    HookRegistry.register("sglang.kernels.jit.utils.compile.loader.load_jit", jit.load_jit, HookType.REPLACE)
    if os.environ.get("GPU_KIT_DEVICE") == "fake":
        from tests.rehearsal import graphs

        graphs.install()
    # Needs NVIDIA's CuTe DSL; without it the gate and up projections run separately.
    HookRegistry.register("sglang.srt.layers.dual_gemm.DualGemm._select_mode", _no_mode, HookType.REPLACE)


def _no_mode(self: Any, gate_up_proj: Any, hidden_size: int) -> None: ...
