"""Upstream functions that cannot run on a plain CPU, and what stands in for each.

Every row names an SGLang function that is written in Triton (or assumes a CUDA stream), the parameters that our
stand-in takes, why the original cannot run here, and the torch function that replaces it. Rows are applied through
SGLang's own ``HookRegistry`` in every process; a contract test asserts that each target has these parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.cpu import alloc, collectives, threads
from sglang_dflash.upstream import Symbol


@dataclass(frozen=True)
class Replacement:
    """One stand-in: ``target`` is replaced by ``function`` because of ``reason``."""

    target: Symbol
    function: Callable[..., Any]
    reason: str


_ALLOCATION = "sglang.srt.mem_cache.allocation."

TABLE: tuple[Replacement, ...] = (
    Replacement(
        Symbol(
            _ALLOCATION + "assign_req_to_token_pool_func",
            ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        ),
        alloc.assign_slots,
        "Triton kernel: writes the KV slots that speculative decoding reserves into req_to_token",
    ),
    Replacement(
        Symbol(
            _ALLOCATION + "get_last_loc",
            ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        ),
        alloc.last_slots,
        "Triton kernel for every backend but a fixed list of names: finds the slot that a new page continues",
    ),
    Replacement(
        Symbol("sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor", ("output", "input")),
        collectives.all_gather_into_tensor,
        "custom operator without a CPU kernel: gathers logits over tensor-parallel ranks",
    ),
    Replacement(
        Symbol("sglang.srt.distributed.bootstrap._init_cpu_threads_env", ("local_omp_cpuid", "dist_init_method")),
        threads.bind_rank,
        "binds ranks to cores through Intel AMX kernels that are not installed, and does nothing without them",
    ),
)


def install() -> None:
    """Register every row with SGLang's hook registry; a second call in one process does nothing."""
    from sglang_dflash.upstream import HookRegistry, HookType

    for row in TABLE:
        if not any(hook is row.function for _, hook, _ in HookRegistry._hooks[row.target.path]):
            HookRegistry.register(row.target.path, row.function, HookType.REPLACE)


def missing_hooks() -> list[str]:
    """Targets that are not (yet) replaced by our function: SGLang only logs a hook that fails to apply."""
    return [row.target.path for row in TABLE if getattr(row.target.resolve(), "__wrapped__", None) is None]
