"""Hooks into SGLang: tables of functions by target, which each process installs when it has the serving plan."""

import pkgutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream.names import HookRegistry, HookType

Functions = Mapping[str, Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class Hooks:
    """The patches of one feature, by target below ``sglang.srt``.

    Attributes:
        before: functions of a call's arguments; they return None, or other positional and keyword arguments.
        around: functions of the original and the arguments; they return the result.
        after: functions of the result and the arguments; they return None, or another result.
        values: attributes that no function can wrap, such as properties.
    """

    before: Functions = field(default_factory=dict)
    around: Functions = field(default_factory=dict)
    after: Functions = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    def functions(self) -> Iterator[tuple[str, HookType, Callable[..., Any]]]:
        kinds = (HookType.BEFORE, self.before), (HookType.AROUND, self.around), (HookType.AFTER, self.after)
        for kind, functions in kinds:
            yield from ((f"sglang.srt.{target}", kind, function) for target, function in functions.items())


_tables: list[Hooks] = []  # installed in this process


def register(table: Hooks) -> None:
    """Register a table. SGLang patches its targets once all plugins are loaded."""
    _tables.append(table)
    for target, kind, function in table.functions():
        HookRegistry.register(target, function, kind)


def install(*tables: Hooks) -> None:
    """Register tables and patch their targets now, each table once per process.

    Raises:
        DFlashError: a target is not patched, which SGLang only logs.
    """
    for table in tables:
        if any(table is each for each in _tables):
            continue
        for target, kind, function in table.functions():
            if target in HookRegistry._patched:  # SGLang patches a target once
                HookRegistry._apply_target(target, [(kind, function, None)])
        register(table)
        for path, value in table.values.items():
            owner, _, name = f"sglang.srt.{path}".rpartition(".")
            setattr(pkgutil.resolve_name(owner), name, value)
    HookRegistry.apply_hooks()
    check()


def installed() -> list[str]:
    """Return the names below ``sglang.srt`` that this process patches."""
    hooked = (target.removeprefix("sglang.srt.") for table in _tables for target, _, _ in table.functions())
    return sorted({*hooked, *(path for table in _tables for path in table.values)})


def check() -> None:
    missing = {target for table in _tables for target, _, _ in table.functions()} - HookRegistry._patched
    if missing:
        raise DFlashError(
            f"hooks not applied: {', '.join(sorted(missing))}",
            remedy="read the log's traceback; install the SGLang version this release is tested with",
        )
