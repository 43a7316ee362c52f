"""Which room of the package may import which: one table, and every import of the package held to it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang_dflash
import sglang_dflash_cpu

PACKAGE = Path(sglang_dflash.__file__).parent
NAME = PACKAGE.name
WITHOUT_SGLANG = {"errors", "causes", "ops", "drafter", "launch", "width", "check"}
OUTSIDE = {"sglang_dflash_cpu", "sglang_dflash_lab", "tests", "tools"}

BASE = {"errors", "upstream"}
GROUND = BASE | {"ops", "drafter"}
SERVED = GROUND | {"launch"}
STEP = SERVED | {"width", "model", "states", "step"}
# A room is a folder of the package, or a module beside the folders.
ALLOWED: dict[str, set[str]] = {
    "__init__": set(),
    "errors": set(),
    "causes": set(),
    "upstream": {"errors"},
    "ops": BASE,
    "drafter": BASE,
    "model": SERVED,
    "width": SERVED,
    "step": SERVED,
    "states": SERVED,
    "launch": GROUND,
    "features": STEP | {"causes"},
    "worker": STEP | {"features"},
    "enter": STEP | {"features", "worker"},
    "plugin": STEP | {"features", "worker", "enter"},
    # The other program: no room above may import it.
    "check": GROUND | {"launch", "causes", "plugin"},
}


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import that runs, also inside functions; not those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield from imports(other)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        else:
            yield from imports(node)


def violations(file: Path, text: str) -> Iterator[str]:
    """``file:line: room imports name`` for every import that the table does not allow.

    Args:
        file: relative to the package.
    """
    room = file.parts[0].removesuffix(".py")
    for line, name in imports(ast.parse(text)):
        package, _, inside = name.partition(".")
        if package in OUTSIDE or (package == "sglang" and room in WITHOUT_SGLANG):
            yield f"{NAME}/{file}:{line}: {room} imports {name}"
        target = inside.split(".")[0]
        if package != NAME or target == room or target not in ALLOWED:  # the last: its version
            continue
        if not any(f"{inside}.".startswith(f"{allowed}.") for allowed in ALLOWED[room]):
            yield f"{NAME}/{file}:{line}: {room} imports {inside}"


def test_every_import_goes_an_allowed_way() -> None:
    files = {path.relative_to(PACKAGE): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    assert {file.parts[0].removesuffix(".py") for file in files} == set(ALLOWED), "a room is not in the table"
    found = [line for file, text in files.items() for line in violations(file, text)]
    assert not found, "\n" + "\n".join(found)


def test_the_cpu_platform_imports_no_command() -> None:
    """It runs in every server of a CPU."""
    files = {path: path.read_text() for path in Path(sglang_dflash_cpu.__file__).parent.rglob("*.py")}
    names = [(path.name, name) for path, text in files.items() for _, name in imports(ast.parse(text))]
    assert len(files) > 10 and [each for each in names if each[1].startswith(f"{NAME}.check")] == []
