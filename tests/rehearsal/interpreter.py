"""Triton's interpreter, fit for SGLang's kernels on CPU tensors: every launch is counted and kept within its tensors.

What it hides: registers, shared memory, warps and their races, the precision of tensor cores, and the choice of the
autotuner (the first configuration that survives pruning serves).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import _disable_current_modes
from triton.backends.compiler import BaseBackend
from triton.language.extra import libdevice
from triton.runtime import autotuner, driver, interpreter
from triton.runtime.jit import native_specialize_impl

# Launches of each kernel, by its dotted path.
LAUNCHES: collections.Counter[str] = collections.Counter()
# Compilations that the launches would have taken on a device: the kernel's dotted path and what Triton keeps it under.
COMPILED: set[str] = set()
# Takes (executor, args, kwargs) of every launch while a graph is captured.
recorders: list[Callable[[Any, Any, Any], None]] = []
# Take the path and the tensors of every kernel that is launched and not captured.
argument_checks: list[Callable[[str, list[torch.Tensor]], None]] = []

# They follow addresses that they load from a table, which no argument's extent can bound.
FOLLOW_POINTERS = {
    "_fused_conv_window_scatter_multi_kernel",
    "_fused_slot_clear_kernel",
    "_fused_slot_copy_kernel",
    "copy_all_layer_kv_cache_tiled",
    "write_req_to_token_pool_triton",
}


class OutOfBounds(RuntimeError):
    """A kernel would have touched memory of none of its tensors."""


@functools.cache  # several files of tests share a process
def install() -> None:
    """Patch Triton in this process. TRITON_INTERPRET=1 must have been set before it was first imported."""
    assert triton.knobs.runtime.interpret, "TRITON_INTERPRET=1 must be set before triton is imported"
    driver.set_active(_driver())
    autotuner.Autotuner.run = _run_first_config
    interpreter.GridExecutor.__call__ = _watched(interpreter.GridExecutor.__call__)
    interpreter.InterpretedFunction.run = _compiling(interpreter.InterpretedFunction.run)
    # Arguments on a CPU are read and written in place: there is nothing to copy back.
    interpreter.GridExecutor._restore_args_dev = lambda self, *args: None
    interpreter.InterpretedFunction.rewrite = _with_aliases(interpreter.InterpretedFunction.rewrite)
    _check_memory(interpreter.InterpreterBuilder)
    _compute_bfloat16(interpreter.InterpreterBuilder)
    libdevice.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)  # CUDA's library is not there


def _driver() -> Any:
    """Launchers ask which device is there; theirs is a small one."""
    properties = {"multiprocessor_count": 4, "max_shared_mem": 232448, "max_num_regs": 65536, "warpSize": 32}
    return SimpleNamespace(
        get_current_target=lambda: SimpleNamespace(backend="cpu", arch="interpreter", warp_size=32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=None: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_device_interface=lambda: torch.cpu,
        get_benchmarker=lambda: lambda call, quantiles=None, **options: (call(), [0.0, 0.0, 0.0])[1],
        utils=SimpleNamespace(get_device_properties=lambda index=0: properties),
    )


def _run_first_config(self: Any, *args: Any, **kwargs: Any) -> Any:
    """In place of ``Autotuner.run``, which times every configuration on a device."""
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.prune_configs(kwargs)[0] if len(self.configs) > 1 else self.configs[0]
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    result = self.fn.run(*args, **kwargs, **config.all_kwargs())
    self.nargs = None
    return result


def _with_aliases(rewrite: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Kernels that call ``exp = tl.exp`` of their module: the interpreter replaces members of ``tl`` only."""
    seen: set[int] = set()

    def rewrite_with_aliases(self: Any) -> Any:
        scope = self.fn.__globals__
        if id(scope) not in seen:
            seen.add(id(scope))
            scope.update({name: _interpreted(value) for name, value in scope.items() if tl.core.is_builtin(value)})
        return rewrite(self)

    return rewrite_with_aliases


def _interpreted(builtin: Any) -> Any:
    def call(*args: Any, _semantic: Any = None, **kwargs: Any) -> Any:
        return builtin(*args, **kwargs, _semantic=interpreter.interpreter_semantic)

    return call


def _compute_bfloat16(builder: Any) -> None:
    """To numpy a bfloat16 is an integer of 16 bits: arithmetic goes through float32, and its results are rounded to the
    nearest, as on a GPU. Triton's interpreter cuts them off."""
    cast = builder.cast_impl

    def rounded(self: Any, src: Any, dtype: Any) -> Any:
        if src.dtype.scalar != tl.float32 or dtype.scalar != tl.bfloat16:
            return cast(self, src, dtype)
        nearest = torch.from_numpy(np.ascontiguousarray(src.data, np.float32)).bfloat16()
        return interpreter.TensorHandle(nearest.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    builder.cast_impl = rounded

    def widened(handle: Any) -> Any:
        is_bfloat16 = isinstance(handle, interpreter.TensorHandle) and handle.dtype.scalar == tl.bfloat16
        return builder.cast_impl(builder, handle, tl.float32) if is_bfloat16 else handle

    def through_float32(operation: Callable[..., Any]) -> Callable[..., Any]:
        def run(self: Any, *operands: Any, **options: Any) -> Any:
            wide = [widened(operand) for operand in operands]
            result = operation(self, *wide, **options)
            narrow = (
                any(one is not other for one, other in zip(wide, operands, strict=True))  # of a select, the last two
                and result.dtype.scalar == tl.float32
                and result.data.dtype == np.float32
            )
            return builder.cast_impl(builder, result, tl.bfloat16) if narrow else result

        return run

    for name in ("unary_op", "binary_op", "ternary_op"):
        setattr(builder, name, through_float32(getattr(builder, name)))
    dot = builder.create_dot
    builder.create_dot = lambda self, a, b, *others: dot(self, widened(a), widened(b), *others)


# --- compilations


def _compiling(run: Callable[..., Any]) -> Callable[..., Any]:
    def note_and_run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = f"{self.fn.__module__}.{self.fn.__name__}"
        given = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        COMPILED.add(f"{kernel}({', '.join(_specialisation(self, given))})")
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    return note_and_run


def _specialisation(function: Any, given: dict[str, Any]) -> Iterator[str]:
    """As ``JITFunction`` tells one compilation from another; options such as ``num_warps`` are arguments too."""
    annotations = inspect.get_annotations(function.fn)
    unspecialised = set(function.kwargs.get("do_not_specialize") or ())
    unaligned = set(function.kwargs.get("do_not_specialize_on_alignment") or ())
    for number, (name, value) in enumerate(given.items()):
        if name not in function.arg_names or "constexpr" in str(annotations.get(name)):
            yield f"{name}={value}"
            continue
        specialise, align = (unspecialised.isdisjoint((name, number)), unaligned.isdisjoint((name, number)))
        kind, key = native_specialize_impl(BaseBackend, value, False, specialise, align)
        yield f"{name}: {kind} {key or ''}".rstrip()


# --- launches

# Extents (first byte, one past the last) of the launching kernel's tensors; None while any address is allowed.
_extents: list[tuple[int, int]] | None = None
_kernel = ""


def _watched(call: Callable[..., Any]) -> Callable[..., Any]:
    def launch(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _extents, _kernel
        _kernel = f"{self.fn.__module__}.{self.fn.__name__}"
        LAUNCHES[_kernel] += 1
        if recorders:  # a capture notes what is launched and runs nothing
            recorders[-1](self, args, kwargs)
            return None
        for check in argument_checks:
            with pause():
                check(_kernel, [*_tensors((*args, *kwargs.values()))])
        free = self.fn.__name__ in FOLLOW_POINTERS
        _extents = None if free else [_extent(tensor) for tensor in _tensors((*args, *kwargs.values()))]
        with pause():  # what the interpreter does with its arguments is no part of a graph
            return call(self, *args, **kwargs)

    return launch


@contextlib.contextmanager
def pause() -> Iterator[None]:
    """Nothing in here is seen by a capture, or by another mode of torch."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
        elif hasattr(value, "base"):  # a tensor descriptor
            yield value.base


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Of the tensor itself where it is one piece of memory, else of the storage that it is a view of."""
    if tensor.is_contiguous():
        return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()


def _check_memory(builder: Any) -> None:
    load, store, rmw = builder.create_masked_load, builder.create_masked_store, builder.create_atomic_rmw

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, _within("loads", ptrs, mask), *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, _within("stores", ptrs, mask), *rest)

    def atomic_rmw(self: Any, operation: Any, ptr: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return rmw(self, operation, ptr, value, _within("updates", ptr, mask), *rest)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw = atomic_rmw


def _within(verb: str, ptrs: Any, mask: Any) -> Any:
    """``mask`` as booleans (terms that went through an integer left 0 and 1).

    Raises:
        OutOfBounds: an address that it lets pass lies in none of the kernel's tensors.
    """
    lanes = np.asarray(mask.data).astype(bool, copy=False)  # to Triton 3.6 a block pointer's mask is an array itself
    if _extents is not None:
        addresses = ptrs.data[lanes]
        size = max(1, ptrs.get_element_ty().primitive_bitwidth // 8)
        whole = not addresses.size or _inside(int(addresses.min()), int(addresses.max()) + size)
        stray = [] if whole else [each for each in np.unique(addresses).tolist() if not _inside(each, each + size)]
        if stray:
            raise OutOfBounds(f"{_kernel} {verb} {len(stray)} values outside of its tensors")
    return interpreter.TensorHandle(lanes, tl.int1)


def _inside(first: int, end: int) -> bool:
    return any(start <= first and end <= stop for start, stop in _extents or ())
