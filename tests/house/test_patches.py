"""The patches apply to the installed SGLang together; each one's program fails without it and passes with it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.entries import ENTRIES
from tests.launch.test_entries import run_entry
from tests.support.generation import generate
from tests.support.prompts import corpus
from tests.support.servers import dflash_server

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "patches"
PATCHES = sorted(FOLDER.glob("*.patch"))
PROGRAMS = sorted(FOLDER.glob("*.py"))


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Links to the installed files, and real copies of the patched ones."""
    spec, tree = importlib.util.find_spec("sglang"), tmp_path_factory.mktemp("tree")
    assert spec is not None and spec.submodule_search_locations
    (installed,) = map(Path, spec.submodule_search_locations)
    subprocess.run(["cp", "--recursive", "--symbolic-link", str(installed), str(tree)], check=True)
    for patch in PATCHES:
        for file in re.findall(r"^\+\+\+ b/(\S+)", patch.read_text(), flags=re.MULTILINE):
            if (tree / file).is_symlink():
                (tree / file).unlink()
                shutil.copy(installed.parent / file, tree / file)
        done = subprocess.run(["git", "apply", str(patch)], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, (patch.name, done.stderr)
    return tree


def test_every_patch_applies_and_has_a_program_and_a_row(tree: Path) -> None:
    ours = {"register-plugin"}  # for this package; the others are for SGLang
    assert {each.stem for each in PROGRAMS} == {each.stem for each in PATCHES} - ours
    page = (FOLDER / "README.md").read_text()
    assert [each.name for each in PATCHES if f"`{each.name}`" not in page] == []


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: path.stem)
def test_a_program_fails_on_the_release_and_passes_on_the_patched_tree(program: Path, tree: Path) -> None:
    found = {}
    for path in ("", str(tree)):
        environment = {**os.environ, "PYTHONPATH": path, "SGLANG_PLUGINS": "probe"}
        done = subprocess.run([sys.executable, str(program)], env=environment, capture_output=True, text=True)
        found[bool(path)] = done
    assert found[False].returncode == 1 and re.search("AssertionError: (?!.*not reached)", found[False].stderr)
    assert found[True].returncode == 0, found[True].stderr[-3000:]


def on(tree: Path) -> dict[str, str]:
    path = [str(tree), str(ROOT), str(ROOT / "cpu_platform"), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(path)}


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("entry", [entry.__name__ for entry in ENTRIES])
def test_the_entries_of_a_patched_tree(entry: str, tree: Path) -> None:
    run_entry(entry, **on(tree))


@pytest.mark.engine
@pytest.mark.slow
def test_a_patched_tree_serves_dflash_without_the_entry_point(tree: Path, tmp_path: Path) -> None:
    hidden = {"SGLANG_PLUGINS": "none", "SGLANG_PLATFORM": "dflash_cpu"}
    with dflash_server("tiny-dense", tmp_path, **on(tree), **hidden) as server:
        answer = generate(server, corpus("tiny-dense", 1)[0])
        assert answer.meta["spec_verify_ct"] < len(answer.tokens)
        assert "Executed general plugin" not in server.log
