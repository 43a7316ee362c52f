"""What one SGLang release has of what this package needs; it runs in a process whose ``sglang`` is that release.

``python -m tools.contract.probe NEEDS.json SEEN.json``. It imports the seam alone: the rest may not import
beside another release.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.upstream import Symbol


@dataclass(frozen=True)
class Need:
    """A name of SGLang that this package uses.

    Attributes:
        path: its dotted path.
        params: the parameters that we pass, or that our function in its place takes.
        use: what for, in one line.
        hooked: whether our function is called around it, before, after or instead of it.
        text_only: whether only the module's text is read: importing it is dear, or defines the name on a GPU only.
        by_attribute: whether we read its attributes, as of a type in annotations.
    """

    path: str
    params: tuple[str, ...] = ()
    use: str = ""
    hooked: bool = False
    text_only: bool = False
    by_attribute: bool = False


@dataclass(frozen=True)
class Seen:
    """One name in one release.

    Attributes:
        problem: what :meth:`Symbol.problem` says against it.
        unimportable: why its module cannot be imported in this environment, where that is the problem.
        parameters: names of its parameters, ``None`` if it has no signature.
        required: those without a default.
        code: hash of its code without comments and docstrings, or of its value; ``None`` if it has no text.
        attributes: what an instance of the type has; empty unless asked for.
    """

    problem: str | None = None
    unimportable: str | None = None
    parameters: tuple[str, ...] | None = None
    required: tuple[str, ...] = ()
    code: str | None = None
    attributes: tuple[str, ...] = ()


def look(need: Need) -> Seen:
    if need.text_only:
        return Seen() if name_is_bound(need.path) else Seen(problem=f"{need.path}: not found")
    try:
        target = resolve(need.path)
    except Gone as gone:
        return Seen(problem=f"{need.path}: not found ({gone})")
    except Exception as error:  # noqa: BLE001  a module of another release may raise anything
        return Seen(problem=f"{need.path}: not found", unimportable=f"{type(error).__name__}: {first_line(str(error))}")
    parameters = signature_of(target)
    return Seen(
        Symbol(need.path, need.params).problem(),
        None,
        None if parameters is None else tuple(parameters),
        () if parameters is None else tuple(name for name, each in parameters.items() if is_required(each)),
        code_of(target),
        tuple(sorted(attributes_of(target))) if need.by_attribute else (),
    )


class Gone(Exception):
    """SGLang itself has no such name, whatever else is installed."""


def resolve(path: str) -> Any:
    """The object; unlike ``pkgutil.resolve_name`` it keeps a missing name and a failing import apart.

    Raises:
        Gone: there is no such name.
        Exception: whatever an import raises.
    """
    root, *names = path.split(".")
    target, reached = importlib.import_module(root), root
    for name in names:
        if not hasattr(target, name):
            if inspect.ismodule(target) and hasattr(target, "__path__"):
                try:
                    importlib.import_module(f"{reached}.{name}")
                except ModuleNotFoundError as error:
                    if str(error.name).partition(".")[0] == root:
                        raise Gone(f"no module {error.name}") from error
                    raise
            else:
                raise Gone(f"{reached} has no {name}")
        target, reached = getattr(target, name), f"{reached}.{name}"
    return target


def name_is_bound(path: str) -> bool:
    """Whether the text of the module assigns, defines or imports the name anywhere."""
    module, _, name = path.rpartition(".")
    root, *parts = module.split(".")
    package = importlib.import_module(root).__path__[0]
    file = Path(package, *parts).with_suffix(".py")
    if not file.exists():
        return False
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            if any((alias.asname or alias.name) == name for alias in node.names):
                return True
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            if node.name == name:
                return True
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id == name:
            return True
    return False


def signature_of(target: Any) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(target).parameters)
    except (TypeError, ValueError):
        return None


def is_required(parameter: inspect.Parameter) -> bool:
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in variadic


def code_of(target: Any) -> str | None:
    if isinstance(target, str | int | float | tuple | list | dict):
        return digest(repr(target))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(target))))
    except (TypeError, OSError, SyntaxError):
        return None
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return digest(ast.dump(tree))


def first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def attributes_of(cls: type) -> Iterator[str]:
    """What an instance has: names of the classes, annotated ones, and those that some method assigns to ``self``."""
    yield from dir(cls)
    for base in cls.__mro__:
        yield from vars(base).get("__annotations__", ())
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (TypeError, OSError):
            continue
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                yield node.attr


def as_tuple(value: Any) -> Any:
    """A value of a dataclass here, back from JSON."""
    return tuple(value) if isinstance(value, list) else value


def read_needs(file: Path) -> list[Need]:
    return [Need(**{key: as_tuple(value) for key, value in row.items()}) for row in json.loads(file.read_text())]


def look_at_all(needs: Path, seen: Path) -> None:
    import sglang

    found = {need.path: asdict(look(need)) for need in read_needs(needs)}
    seen.write_text(json.dumps({"sglang": sglang.__file__, "names": found}))


if __name__ == "__main__":
    look_at_all(Path(sys.argv[1]), Path(sys.argv[2]))
