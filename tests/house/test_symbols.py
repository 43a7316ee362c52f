"""Every SGLang name we use exists in the installed release, with the parameters that we pass."""

from __future__ import annotations

import ast
import inspect
import pkgutil

import pytest

from sglang_dflash import upstream
from sglang_dflash_cpu.replacements import TABLE

pytestmark = pytest.mark.sglang

pytest.importorskip("sglang")


@pytest.mark.parametrize("name", sorted(upstream.SYMBOLS))
def test_symbol(name: str) -> None:
    assert upstream.SYMBOLS[name].problem() is None


def test_names_of_annotations_exist() -> None:
    """mypy does not follow imports into SGLang, so nothing else would notice that one is gone."""
    tree = ast.parse(inspect.getsource(upstream))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    names = [
        f"{node.module}.{name.name}" for node in block.body if isinstance(node, ast.ImportFrom) for name in node.names
    ]
    assert names
    for name in names:
        assert isinstance(pkgutil.resolve_name(name), type), name


def test_installed_version_is_supported() -> None:
    upstream.check_version()
    upstream.check_symbols(row.target for row in TABLE)
