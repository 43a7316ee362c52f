"""What this package needs of SGLang and what for; it runs in a process whose ``sglang`` is the tested release.

``python -m tools.contract.needs NEEDS.json SEEN.json`` writes them, and how that release has them: those of
the seam's tables and annotations, of the CPU platform's replacements and of every hook that the plugin registers.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sglang_dflash
from sglang_dflash import upstream
from tools.contract.probe import Need, first_line, look_at_all

PACKAGE = Path(sglang_dflash.__file__).parent


def all_needs() -> list[Need]:
    users, hooks, stand_ins = users_of_names(), registered_hooks(), replacements()
    needs = {each.path: each for each in stand_ins}
    for name, symbol in upstream.SYMBOLS.items():
        owner, _, method = name.rpartition(".")
        use = hooks.get(symbol.path) or users.get(name) or users.get(owner) or users.get(method, "")
        hooked, text_only = symbol.path in hooks, symbol.path == upstream.MODEL_REGISTRY
        needs.setdefault(symbol.path, Need(symbol.path, symbol.params, use, hooked=hooked, text_only=text_only))
    for name, symbol in upstream.CUDA_SYMBOLS.items():
        needs[symbol.path] = Need(symbol.path, (), users.get(name, ""), text_only=True)
    for path in annotations(inspect.getsource(upstream)):
        needs[path] = replace(needs.get(path, Need(path, (), "its attributes are read")), by_attribute=True)
    return list(needs.values())


def users_of_names() -> dict[str, str]:
    """A name of the seam -> a module that uses it, if possible on every device, and that module's own first line."""
    users: dict[str, list[str]] = defaultdict(list)
    files = set(PACKAGE.rglob("*.py")) - {Path(upstream.__file__)}
    for file in sorted(files, key=lambda file: (file.is_relative_to(PACKAGE / "cpu"), file)):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        line = f"{file.relative_to(PACKAGE)}: {first_line(ast.get_docstring(tree))}"
        for name in {name for node in ast.walk(tree) for name in names_of_seam(node)}:
            users[name].append(line)
    return {name: lines[0] + (f" (and {len(lines) - 1} more)" if lines[1:] else "") for name, lines in users.items()}


def names_of_seam(node: ast.AST) -> Iterator[str]:
    """``from sglang_dflash.upstream import NAME``, ``.NAME`` and a string ``"NAME"``."""
    if isinstance(node, ast.ImportFrom) and node.module == upstream.__name__:
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.Attribute):
        yield node.attr
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in upstream.SYMBOLS:
        yield node.value


def registered_hooks() -> dict[str, str]:
    """Path of a hooked function -> the first line of our function's docstring."""
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.plugin import register

    register()
    hooks = {path: rows[-1][1] for path, rows in upstream.HookRegistry._hooks.items() if rows}
    steps = {upstream.SYMBOLS[name].path: rows[-1] for name, rows in resolution_hooks._HOOKS.items() if rows}
    return {path: describe(function) for path, function in {**hooks, **steps}.items()}


def replacements() -> Iterator[Need]:
    from sglang_dflash.cpu.replacements import TABLE

    for row in TABLE:
        yield Need(row.path, row.target.params, f"CPU platform. {row.reason}", hooked=True)


def annotations(text: str) -> Iterator[str]:
    """Paths that the seam imports for type checkers only."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.If):
            for each in node.body:
                if isinstance(each, ast.ImportFrom):
                    yield from (f"{each.module}.{alias.name}" for alias in each.names)


def attributes_read() -> set[str]:
    """Names that stand behind a dot anywhere in this package."""
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in PACKAGE.rglob("*.py"))
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def describe(function: Callable[..., Any]) -> str:
    module = function.__module__.removeprefix("sglang_dflash.").replace(".", "/")
    return f"{module}.py: {first_line(inspect.getdoc(function))}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps([asdict(need) for need in all_needs()]))
    look_at_all(Path(sys.argv[1]), Path(sys.argv[2]))
