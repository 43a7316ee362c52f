"""Install a rehearsal in every process of an engine."""

from __future__ import annotations

import dataclasses
import inspect
import os
import pkgutil
import sys
import textwrap
from collections.abc import Callable
from functools import wraps
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

from sglang_dflash.upstream.names import (
    HookRegistry,
    HookType,
    declare_resolution,
    register_resolution_hook,
    resolving_view,
)
from sglang_dflash_cpu import arguments, replacements
from tests.rehearsal import backends, interpreter, report, stubs

# Rows of the CPU platform's table that stay: kernels that are not Triton's on a GPU, and transfers between processes.
# Its weights do not: on Intel processors they are transposed, and kernels read a convolution's as CUDA has it.
KEPT = (
    *("sglang.srt.disaggregation.", "sglang.srt.distributed."),
    *("sglang.srt.layers.layernorm.", "sglang.srt.layers.quantization.unquant.", "sglang.srt.layers.rotary_embedding."),
)
BUILTIN = "sglang.srt.speculative.dflash_worker_v2"  # the kit's other arm
PREFILL_GRAPHS = "REHEARSE_PREFILL_GRAPHS"  # number of tokens for which a breakable prefill graph is captured
# Functions of SGLang with a line that refuses a rehearsal, and what replaces the line.
PATCHES = (
    # To SGLang the device "cpu" has no CUDA graphs.
    (
        "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph",
        'if model_runner.device == "cpu" and not get_flags().capture.enable_torch_compile:',
        "if False:",
    ),
    # The prefill kernel refuses float32, the only dtype in which tokens can be compared one by one.
    (
        "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule",
        "assert q.dtype != torch.float32, (",
        "assert True, (",
    ),
)


def install() -> None:
    """Called while SGLang loads its plugins."""
    interpreter.install()
    stubs.install()
    arguments._KV_DTYPES += ("fp8_e4m3",)  # the torch platform has no kernel for it
    replacements.TABLE = tuple(map(_in_place, filter(_is_kept, replacements.TABLE)))
    replacements.install()
    for patch in PATCHES:
        _patch_source(*patch)
    register_resolution_hook("handle_hardware_runtime_validation")(arguments.validate_runtime)
    register_resolution_hook("handle_cpu_backends")(_choose_backends)
    backends.install()
    pool = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._create_buffers"
    HookRegistry.register(pool, backends.created, HookType.AFTER)
    paged = (f"paged.PagedTokenToKVPoolAllocator.{name}" for name in ("alloc", "alloc_extend", "alloc_decode"))
    for path in ("token.TokenToKVPoolAllocator.alloc", *paged):
        HookRegistry.register(f"sglang.srt.mem_cache.allocator.{path}", backends.handed_out, HookType.AFTER)
    runners = "model_executor.runner_backend"
    segments = f"{runners}_utils.breakable_cuda_graph.breakable_cuda_graph.BreakableCUDAGraph"
    for method, hook in (
        ("managers.scheduler.Scheduler.get_internal_state", report.add),
        ("managers.schedule_batch.ScheduleBatch.prepare_for_extend", report.prefilled),
        ("managers.schedule_batch.ScheduleBatch.mix_with_running", report.mixed),
        ("managers.schedule_batch.ScheduleBatch.retract_decode", report.retracted),
        ("model_executor.model_runner.ModelRunner.forward", report.forwarded),
        (f"{runners}.full_cuda_graph_backend.FullCudaGraphBackend.replay", report.replayed),
        (f"{segments}.replay", report.replayed_prefill),
    ):
        HookRegistry.register(f"sglang.srt.{method}", hook, HookType.AFTER)
    HookRegistry.register("sglang_dflash.states.commit.RecurrentCommit.advance", report.advanced, HookType.AFTER)
    capture = f"sglang.srt.{runners}.full_cuda_graph_backend.FullCudaGraphBackend.capture_one"
    HookRegistry.register(capture, report.capture, HookType.AROUND)
    if os.environ.get("REHEARSE_BUILTIN"):
        HookRegistry.register(f"{BUILTIN}.DFlashWorkerV2.__init__", _on_cuda, HookType.BEFORE)


def _on_cuda(*args: Any, **kwargs: Any) -> Any:
    """Hook before the constructor of SGLang's worker: it chooses its kernels as on a GPU."""
    sys.modules[BUILTIN].is_cuda = lambda: True  # type: ignore[attr-defined]
    return args, kwargs


def _is_kept(row: replacements.Replacement) -> bool:
    return row.path.startswith(KEPT) and not row.path.endswith(".create_weights")


def _in_place(row: replacements.Replacement) -> replacements.Replacement:
    """Make a norm with a residual overwrite both its arguments, as on a GPU."""
    if "RMSNorm.forward_native" not in row.path or not row.partial:
        return row
    norm = row.function

    @wraps(norm)
    def overwrite(
        original: Callable[..., Any], self: Any, x: Any, residual: Any = None, *others: Any, **options: Any
    ) -> Any:
        if residual is None:
            return norm(original, self, x, residual, *others, **options)
        normed, total = norm(original, self, x, residual, *others, **options)
        return x.copy_(normed), residual.copy_(total)

    return dataclasses.replace(row, function=overwrite)


def _choose_backends(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Choose as the CPU platform does, except for attention and graphs."""
    asked = resolving_view(server_args)
    graph_config, drafts = asked.cuda_graph_config, asked.speculative_draft_attention_backend
    others = asked.enable_deterministic_inference or os.environ.get("REHEARSE_BUILTIN")
    arguments.choose_backends(server_args, previous)
    if tokens := os.environ.get(PREFILL_GRAPHS):
        sizes = {"bs": [int(tokens)], "max_bs": int(tokens)}
        graph_config = with_phase(graph_config, Phase.PREFILL, backend=Backend.BREAKABLE, **sizes)
    else:
        graph_config = with_phase(graph_config, Phase.PREFILL, backend=Backend.DISABLED)
    declare_resolution(
        server_args,
        __name__,
        attention_backend=backends.target(),
        speculative_draft_attention_backend=drafts or ("triton" if others else backends.drafter()),
        cuda_graph_config=with_phase(graph_config, Phase.DECODE, backend=Backend.FULL),
    )


def _patch_source(function: str, old: str, new: str) -> None:
    """Replace a line of a function, in its module and wherever it was imported to."""
    from sglang.srt.plugins.hook_registry import _propagate_patch

    path, _, name = function.rpartition(".")
    module: Any = pkgutil.resolve_name(path)
    original = getattr(module, name)
    source = textwrap.dedent(inspect.getsource(inspect.unwrap(original)))
    source = source[source.index("def ") :]  # without decorators
    assert source.count(old) == 1, f"{function} has changed: {old!r} is not in it once"
    code = "from __future__ import annotations\n" + source.replace(old, new)
    exec(compile(code, module.__file__, "exec"), module.__dict__)
    _propagate_patch(original, getattr(module, name), module)
