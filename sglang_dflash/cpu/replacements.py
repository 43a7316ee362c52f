"""Upstream functions that cannot run on a plain CPU, and what stands in for each.

Every row names an SGLang function that is written in Triton (or assumes a CUDA stream), the parameters that our stand-in
takes, why the original cannot run here, and the torch function that replaces it. Rows are applied through SGLang's own
``HookRegistry`` in every process; a contract test asserts that each target exists with these parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.upstream import Symbol


@dataclass(frozen=True)
class Replacement:
    """One stand-in: ``target`` is replaced by ``function`` because of ``reason``."""

    target: Symbol
    function: Callable[..., Any]
    reason: str


TABLE: tuple[Replacement, ...] = ()


def install() -> None:
    """Register every row with SGLang's hook registry; a second call in one process does nothing."""
    from sglang_dflash.upstream import HookRegistry, HookType

    for row in TABLE:
        if not any(hook is row.function for _, hook, _ in HookRegistry._hooks[row.target.path]):
            HookRegistry.register(row.target.path, row.function, HookType.REPLACE)
