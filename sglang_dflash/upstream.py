"""The seam to SGLang: every fragile upstream name this package uses, in one table.

Import a name from here (``from sglang_dflash.upstream import BaseSpecWorker``) and it is resolved on first use, so
importing this module imports nothing of SGLang. :func:`check` resolves the whole table and compares the parameters
that we rely on, so that a new SGLang release breaks here, in one message, and not in the middle of a step.
The CPU platform's function replacements have a table of their own (:mod:`sglang_dflash.cpu.replacements`), because
there the upstream name is the *target* of a hook; :func:`check` is given those rows too.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_dflash.errors import DFlashError

SUPPORTED_VERSIONS = ("0.5.23",)
ALLOW_ANY_VERSION = "SGLANG_DFLASH_ALLOW_ANY_SGLANG"


@dataclass(frozen=True)
class Symbol:
    """An upstream object and the parameters we pass to it.

    Attributes:
        path: dotted path of the object, the class attribute included (``"pkg.mod.Class.method"``).
        params: parameter names that must exist in its signature; empty for constants and types.
    """

    path: str
    params: tuple[str, ...] = ()

    def resolve(self) -> Any:
        return pkgutil.resolve_name(self.path)

    def problem(self) -> str | None:
        """One line saying what is wrong with the symbol in the installed SGLang, or None."""
        try:
            target = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.path}: not found ({error})"
        if not self.params:
            return None
        found = inspect.signature(target).parameters
        missing = [name for name in self.params if name not in found]
        return f"{self.path}: parameters {missing} not in ({', '.join(found)})" if missing else None


_SRT = "sglang.srt."

SYMBOLS: dict[str, Symbol] = {
    # plugins and platforms
    "HookRegistry": Symbol(_SRT + "plugins.hook_registry.HookRegistry"),
    "HookType": Symbol(_SRT + "plugins.hook_registry.HookType"),
    "CpuDeviceMixin": Symbol(_SRT + "platforms.cpu.CpuDeviceMixin"),
    "SRTPlatform": Symbol(_SRT + "platforms.interface.SRTPlatform"),
    "PlatformCapabilities": Symbol(_SRT + "platforms.interface.PlatformCapabilities"),
    "PlatformEnum": Symbol(_SRT + "platforms.device_mixin.PlatformEnum"),
}


def __getattr__(name: str) -> Any:
    symbol = SYMBOLS.get(name)
    if symbol is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: add it to SYMBOLS")
    value = symbol.resolve()
    globals()[name] = value
    return value


def installed_version() -> str | None:
    """Version of the installed SGLang distribution, None where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_version() -> None:
    """Refuse an SGLang that this release was not tested with.

    Raises:
        DFlashError: naming the version found, the versions tested and the variable that overrides the check.
    """
    found = installed_version()
    if found in SUPPORTED_VERSIONS or os.environ.get(ALLOW_ANY_VERSION) == "1":
        return
    raise DFlashError(
        f"SGLang {found or 'not installed'}",
        expected=f"a version this release of sglang-dflash is tested with: {', '.join(SUPPORTED_VERSIONS)}",
        remedy=f"install sglang=={SUPPORTED_VERSIONS[-1]}, or set {ALLOW_ANY_VERSION}=1 to try this one at your own risk",
    )


def check_symbols(extra: Iterable[Symbol] = ()) -> None:
    """Resolve every symbol and compare signatures.

    Raises:
        DFlashError: listing every symbol that is missing or lacks a parameter.
    """
    problems = [line for symbol in (*SYMBOLS.values(), *extra) if (line := symbol.problem())]
    if problems:
        raise DFlashError(
            f"SGLang {installed_version()} differs from what sglang-dflash calls: " + "; ".join(problems),
            expected=f"the interfaces of SGLang {', '.join(SUPPORTED_VERSIONS)}",
            remedy=f"install sglang=={SUPPORTED_VERSIONS[-1]} or a newer sglang-dflash",
        )
