"""The installed SGLang has every name that we use, and another one is refused in one message."""

from __future__ import annotations

import ast
import inspect
import pickle
import pkgutil
from pathlib import Path

import pytest

from sglang_dflash import upstream
from sglang_dflash.errors import DFlashError
from sglang_dflash_cpu.replacements import TABLE

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("name", sorted(upstream.SYMBOLS))
def test_a_symbol_exists_with_the_parameters_that_we_pass(name: str) -> None:
    assert upstream.SYMBOLS[name].problem() is None


def test_names_of_annotations_exist() -> None:
    """mypy does not follow imports into SGLang, so no other check would miss one."""
    tree = ast.parse(inspect.getsource(upstream))
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    nodes = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert nodes
    for name in (f"{node.module}.{name.name}" for node in nodes for name in node.names):
        assert isinstance(pkgutil.resolve_name(name), type), name


def test_the_installed_version_is_supported_without_a_note() -> None:
    assert upstream.check_version() is None
    upstream.check_symbols(row.target for row in TABLE)


@pytest.mark.parametrize("build", [".post1", ".dev3", "rc1", "+cu129", ".post2.dev7+gabc1234", "a1"])
def test_a_build_of_a_tested_release_is_accepted_with_a_note(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tested = upstream.TESTED_SGLANG
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: tested + build)
    assert upstream.check_version() == (
        f"treating SGLang {tested}{build} as {tested}, the release that this package is tested with"
    )


@pytest.mark.parametrize(
    "found", [None, "", "0.5.22.post1", "0.5.24.dev3", "0.5.24rc1", "0.5.230", "0.5.23.1", "1!0.5.23", "unknown"]
)
def test_a_build_of_another_release_is_refused(found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(upstream.ALLOW_ANY_VERSION, raising=False)
    monkeypatch.setattr(upstream, "installed_version", lambda: found)
    with pytest.raises(DFlashError, match=found.replace("+", ".") if found else "not installed"):
        upstream.check_version()


def test_a_name_outside_the_table_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="add it to SYMBOLS"):
        upstream.NoSuchThing  # noqa: B018


def test_errors_keep_their_parts_between_processes() -> None:
    error = DFlashError("block_size 64", expected="2 to 32", remedy="pass a smaller one")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is DFlashError
    assert (copy.value, copy.expected, copy.remedy) == ("block_size 64", "2 to 32", "pass a smaller one")
    assert str(copy) == str(error)


@pytest.mark.parametrize(
    "raised", ["OSError('libcuda.so.1: cannot open shared object file')", "RuntimeError('driver too old')"]
)
def test_a_library_that_fails_in_its_import_is_reported_by_name(
    raised: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kernels_for_tests.py").write_text(f"raise {raised}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(upstream, "SYMBOLS", {"sample": upstream.Symbol("kernels_for_tests.sample")})
    kind, text = raised.rstrip("')").split("('")
    with pytest.raises(DFlashError, match=rf"kernels_for_tests.sample: cannot be imported \({kind}: {text}\)"):
        upstream.check_symbols()
