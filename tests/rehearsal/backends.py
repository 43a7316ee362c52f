"""SGLang's attention backends of other GPUs, over stand-ins of their kernels, and K/V slots that are NaN until written.

No method of SGLang's backend classes is replaced.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import os
import sys
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from sglang_dflash.launch.launch import OUR_BACKEND
from tests.rehearsal import flash, flashinfer_kernels, interpreter

ATTENTION, DRAFT_ATTENTION = "REHEARSE_ATTENTION", "REHEARSE_DRAFT_ATTENTION"
# The target's backend -> compute capability of a GPU whose default it is, and the drafter's there.
GPUS = {
    "triton": ((9, 0), OUR_BACKEND),
    "fa3": ((9, 0), "fa3"),
    "flashinfer": ((8, 0), OUR_BACKEND),
    "trtllm_mha": ((10, 0), "fa4"),
}
_BACKENDS = "sglang.srt.layers.attention"
_FP8_NAN = 0x7F  # of float8_e4m3fn, which SGLang stores as bytes
_POOLS: list[weakref.ref[Any]] = []


def target() -> str:
    return os.environ.get(ATTENTION, "triton")


def drafter() -> str:
    return os.environ.get(DRAFT_ATTENTION) or GPUS[target()][1]


def install() -> None:
    used, capability = {target(), drafter()}, GPUS[target()][0]
    if used & {"fa3", "fa4"}:
        _install_flash(capability)
    if used & {"flashinfer", "trtllm_mha"}:
        _install_flashinfer(
            *(f"{name}_backend" for name in ("flashinfer", "trtllm_mha") if name in {"flashinfer", *used})
        )
    if target() == "trtllm_mha":
        hook: Any = importlib.import_module("sglang.srt.arg_groups.attention_hook")
        hook.get_platform = lambda real=hook.get_platform: _Blackwell(real())
    registry: Any = importlib.import_module(f"{_BACKENDS}.attention_registry")
    registry.get_device_capability = lambda device=0: capability


class _Blackwell:
    is_sm100 = is_sm100_or_sm110 = True

    def __init__(self, facts: Any) -> None:
        self._facts = facts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._facts, name)


@contextlib.contextmanager
def _importable(modules: dict[str, ModuleType]) -> Iterator[None]:
    """By imports of this block only: SGLang chooses other kernels wherever it finds a package."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def _install_flash(capability: tuple[int, int]) -> None:
    fourth = ModuleType("sglang.kernels.ops.attention.flash_attention_v4")
    vars(fourth).update(flash_attn_with_kvcache=flash.fourth_with_kvcache, flash_attn_varlen_func=flash.undefined)
    sys.modules[fourth.__name__] = fourth
    with _importable(flash.modules()):
        backend: Any = importlib.import_module(f"{_BACKENDS}.flashattention_backend")
    third: Any = importlib.import_module("sglang.kernels.ops.attention.flash_attention_v3")
    names = [*inspect.signature(third.flash_attn_with_kvcache).parameters]

    def by_name(*args: Any, **options: Any) -> Any:
        return flash.flash_attn_with_kvcache(**dict(zip(names, args, strict=False)), **options)

    third._load_fa3_kernels = lambda: {"flash_attn_with_kvcache": by_name}
    third._is_fa3_supported = lambda device=None: True
    backend.get_device_capability = lambda device=0: capability
    start = backend.FlashAttentionBackend.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _importable(flash.modules()):  # it imports again
            start(self, *args, **kwargs)

    backend.FlashAttentionBackend.__init__ = init


def _install_flashinfer(*names: str) -> None:
    common: Any = importlib.import_module("sglang.srt.utils")
    available, common.is_flashinfer_available = common.is_flashinfer_available, lambda: True
    with _importable(flashinfer_kernels.modules()):
        for name in names:
            _import_for_cpu(f"{_BACKENDS}.{name}")
    common.is_flashinfer_available = available
    os.environ["SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"] = "1"


def _import_for_cpu(name: str) -> None:
    """Import a module that allocates on "cuda" by that word."""
    assert name not in sys.modules, f"{name} is imported already"
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with open(spec.origin, encoding="utf-8") as file:
        # the watch takes a tensor for the host's where the source says "cpu"
        source = file.read().replace('device="cuda"', 'device="cp" + "u"')
    exec(compile(source, spec.origin, "exec"), module.__dict__)
    setattr(sys.modules[_BACKENDS], name.rpartition(".")[2], module)


# --- slots


def created(result: Any, pool: Any, *_: Any, **__: Any) -> None:
    """Hook after ``MHATokenToKVPool._create_buffers``."""
    _POOLS.append(weakref.ref(pool))


def started() -> None:
    """Forget what the start's dummy steps left in the pools. Slot 0's page is anybody's: rows of padding write it."""
    for pool in filter(None, (reference() for reference in _POOLS)):
        _forget(pool, slice(pool.page_size, None))


def handed_out(slots: Any, allocator: Any, *_: Any, **__: Any) -> None:
    """Hook after an allocator's ``alloc``: nobody has written these slots for their new owner."""
    for pool in filter(None, (reference() for reference in _POOLS)):
        # the drafter's pool has the target's slots, except under a draft window
        if slots is not None and pool.size == allocator.size:
            _forget(pool, slots.long())


def _forget(pool: Any, slots: Any) -> None:
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        with interpreter.pause(), torch.inference_mode():
            buffer[slots] = torch.nan if buffer.is_floating_point() else _FP8_NAN
