"""The contract with SGLang: every name of it that we use, with the parameters that we pass.

Names that we import come from the imports themselves, and the targets of hooks from their tables, with the parameters
that our functions name. ``contract.txt`` has what neither shows: parameters that we pass, and methods that we call.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang_dflash
import sglang_dflash_cpu
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.upstream.names import HookType

if TYPE_CHECKING:
    from sglang_dflash_cpu.replacements import Replacement


@dataclass(frozen=True)
class Symbol:
    """An upstream object and the parameters we pass to it.

    Attributes:
        path: dotted path of the object, ``"pkg.mod.Class.method"`` for a method.
        params: parameter names that must exist in its signature; empty if none is passed.
    """

    path: str
    params: tuple[str, ...] = ()

    def resolve(self) -> Any:
        return pkgutil.resolve_name(self.path)

    def problem(self) -> str | None:
        """Return one line on how the installed SGLang's symbol differs; None if it does not."""
        try:
            target = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.path}: not found ({error})"
        except (OSError, RuntimeError) as error:  # raised by GPU libraries that do not fit the driver
            return f"{self.path}: cannot be imported ({type(error).__name__}: {error})"
        if not self.params:
            return None
        found = inspect.signature(target).parameters
        missing = [name for name in self.params if name not in found]
        return f"{self.path}: parameters {missing} not in ({', '.join(found)})" if missing else None


def _table() -> Iterator[Symbol]:
    for line in Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").splitlines():
        name, _, params = line.rstrip(")").partition("(")
        yield Symbol(name, tuple(params.replace(",", "").split()))


def _imported() -> Iterator[Symbol]:
    """Every name that the package or its CPU platform imports from SGLang, also for annotations and in functions."""
    for package in (sglang_dflash, sglang_dflash_cpu):
        for file in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang."):
                    yield from (Symbol(f"{node.module}.{alias.name}") for alias in node.names)


def tables() -> Iterator[Hooks]:
    """Every table of hooks of the package."""
    for module in pkgutil.walk_packages(sglang_dflash.__path__, "sglang_dflash."):
        if module.name.split(".")[1] != "check":
            found = vars(import_module(module.name)).values()
            yield from (each for each in found if isinstance(each, Hooks))


def _hooked() -> Iterator[Symbol]:
    """The targets of hooks, with the parameters that our functions name; a method's own is named freely."""
    for table in tables():
        yield from (Symbol(f"sglang.srt.{path}") for path in table.values)
        for target, kind, function in table.functions():
            named = list(inspect.signature(function).parameters.values())[kind is not HookType.BEFORE :]
            of_class = isinstance(pkgutil.resolve_name(target.rpartition(".")[0]), type)
            kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
            passed = (each.name for each in named[of_class:] if each.kind in kinds)
            yield Symbol(target, tuple(name for name in passed if not name.startswith("_")))


SYMBOLS = {symbol.path: symbol for symbol in (*_imported(), *_hooked(), *_table())}


def replaced(row: Replacement) -> Symbol:
    """The SGLang function that a row of the CPU platform replaces, with the parameters that its function names."""
    parameters = list(inspect.signature(row.function).parameters.values())[row.partial :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return Symbol(row.path, tuple(each.name for each in parameters if each.kind not in variadic))
