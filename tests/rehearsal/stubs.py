"""What stands in for a device, by the dotted path that it replaces, and what each therefore hides."""

from __future__ import annotations

import contextlib
import functools
import pkgutil
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.moe import fused_moe_native
from torch.nn.functional import linear

from tests.rehearsal import report, streams
from tests.rehearsal.emulator import Graph, captured_by

# Modules that choose a kernel or a copy, or refuse a tensor, by the tensor's device: for them every tensor is on the
# GPU, unless the watch over the scheduler's loop has it on the host.
ON_THE_GPU = {
    "sglang.kernels.ops.attention.triton_gdn_fused_proj",
    "sglang.kernels.ops.kvcache.kv_read_table",
    "sglang.kernels.ops.mamba.mamba_state_scatter_triton",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops",
    "sglang_dflash.model.attention",
    "sglang_dflash.ops",
}
# With the watch, which has pinned memory and copies to the host.
ON_THE_GPU_WITH_THE_WATCH = {
    "sglang_dflash.features.copies",
    "sglang_dflash.features.feature",
    "sglang.srt.utils.common",
}
_is_cpu = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]


def _called_from_the_gpu() -> bool:
    return sys._getframe(2).f_globals.get("__name__") in ON_THE_GPU


def _nothing() -> Callable[..., None]:
    """Return a new function each time: torch's compiler distinguishes its special functions by identity."""
    return lambda *args, **kwargs: None


_GDN = "sglang.srt.layers.attention.linear.gdn_backend."
_RESERVED = ("reserved_bytes.all.current", "reserved_bytes.all.peak")
_PROPERTIES = SimpleNamespace(
    name="rehearsal", major=9, minor=0, multi_processor_count=4, total_memory=8 << 30, is_integrated=0
)


def run_experts(layer: Any, x: torch.Tensor, chosen: Any, config: Any) -> torch.Tensor:
    """Run every expert on every token; SGLang's experts for CPUs count tokens on the host."""
    b13, b2 = (getattr(layer, f"{name}_weight_bias", None) for name in ("w13", "w2"))
    activate: Any = SiluAndMul() if config.activation == "silu" else GeluAndMul()
    if config.gemm1_alpha is not None:
        limits = config.gemm1_alpha, config.gemm1_clamp_limit
        activate = lambda gates: fused_moe_native.swiglu_gpt_oss_sigmoid_alpha(gates, *limits)  # noqa: E731
    out = torch.zeros_like(x)
    for expert in range(layer.num_experts):
        gates = linear(x, layer.w13_weight[expert], None if b13 is None else b13[expert].to(x.dtype))
        found = linear(activate(gates), layer.w2_weight[expert], None if b2 is None else b2[expert].to(x.dtype))
        out += found * (chosen.topk_weights * (chosen.topk_ids == expert)).sum(1, keepdim=True).to(x.dtype)
    return out


# "On CUDA": what CUDA does where the stand-in is milder, and what covers it ("refused": ``refusals.py``, by its kind).
STUBS: dict[str, Any] = {
    # Experts. On CUDA they run in fused kernels; uncovered.
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": run_experts,
    # The device "cuda". On CUDA its tensors are no host tensors; refused: operands, index, numpy, read, copy.
    "sglang_dflash.launch.resolution.on_our_cpu_platform": lambda: True,
    "sglang_dflash.launch.which_worker.served_by_neither": lambda reason, launch: iter(()),  # of the kit
    "sglang_dflash.launch.pair_rules.no_cpu_serves": lambda what, launch: iter(()),
    # A tensor on the GPU, in the modules above. On CUDA a kernel cannot read a host tensor; refused: operands.
    "torch.Tensor.is_cuda": property(lambda tensor: _called_from_the_gpu() and not streams.on_host(tensor)),
    "torch.Tensor.is_cpu": property(
        lambda tensor: _is_cpu(tensor) and not (_called_from_the_gpu() and not streams.on_host(tensor))
    ),
    # A graph. On CUDA the driver may refuse a capture, also by another thread's calls; uncovered, and its speed is.
    "torch.cuda.CUDAGraph": Graph,
    **{
        f"{module}.{name}": stub
        for module in ("torch.cpu", "torch.cuda")
        for name, stub in {
            # A capture and its state. On CUDA work of other streams can end a capture; uncovered.
            "graph": captured_by,
            "is_current_stream_capturing": lambda: Graph.capturing is not None,
            # The graphs' memory pool. On CUDA graphs share its addresses; covered by the emulator, which spoils them.
            "graph_pool_handle": lambda: (0, 0),
            # Events and waits. On CUDA they alone order streams and the host; refused: a read before its event.
            "Event": streams.Event,
            "synchronize": functools.partial(streams.synchronize),
            # The allocator, here and below. On CUDA it fragments and runs out of memory; uncovered.
            "empty_cache": _nothing(),
        }.items()
    },
    "torch.cuda.reset_peak_memory_stats": _nothing(),
    "torch.cuda.memory_stats": lambda device=None: dict.fromkeys(_RESERVED, 0),
    # A watch over compilations under traffic. On CUDA one blocks the host for seconds; covered by "compiled late".
    "sglang.srt.utils.triton_load_watch.mark_serving_started": report.started,
    # A GPU with 4 multiprocessors. On CUDA grids have other sizes; uncovered (tests/ops/published.py compiles them).
    "torch.cuda.get_device_properties": lambda device=None: _PROPERTIES,
    # Its name, by which SGLang chooses tiles of an FP8 product. On CUDA tiles have other sizes; uncovered.
    "sglang.kernels.ops.gemm.fp8_kernel.get_device_name": lambda device_id=0: _PROPERTIES.name,
    # Deterministic inference. On CUDA it replaces operators of CUDA tensors; refused: operands.
    "sglang.srt.batch_invariant_ops.batch_invariant_ops.get_dispatch_device_backend": lambda: "CPU",
    "sglang.srt.batch_invariant_ops.batch_invariant_ops.get_device_core_count": lambda device=0: 4,
    # Choosing a GPU. On CUDA a tensor of another GPU is refused; uncovered.
    "torch.cpu.device": lambda index=None: contextlib.nullcontext(),
    "sglang.kernels.ops.attention.fla.utils.custom_device_ctx": lambda index: contextlib.nullcontext(),
    # Projections of a GDN layer that stay unsplit until its convolution, as on CUDA; nothing is hidden.
    "sglang.srt.models.qwen3_5._gdn_decode_fused_proj_conv": True,
    **{
        f"{_GDN}{name}": getattr(projections, name)
        for name in (
            "can_use_fused_qkvzba_causal_conv1d_update_contiguous",
            "fused_qkvzba_causal_conv1d_update_contiguous",
        )
    },
    # Which forwards have graphs. On CUDA the same ones; nothing is hidden.
    "sglang.srt.model_executor.forward_batch_info.ForwardMode.is_cpu_graph": lambda mode: mode.is_cuda_graph(),
    # The runtime's answer for a stream. On CUDA a side stream may be outside of the capture; uncovered.
    "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph._is_stream_capturing": (
        lambda stream: Graph.capturing is not None
    ),
}
# Absent where there is no GPU.
_ONLY_ON_A_GPU = "torch.cpu.", _GDN


def install() -> None:
    """Put every stand-in in place, in this process.

    Raises:
        AssertionError: a stand-in replaces nothing.
    """
    streams.install()
    for path, stub in STUBS.items():
        owner, _, name = path.rpartition(".")
        place = pkgutil.resolve_name(owner)
        assert path.startswith(_ONLY_ON_A_GPU) or hasattr(place, name), f"{path} does not exist"
        setattr(place, name, stub)
