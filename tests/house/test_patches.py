"""The patch applies to the installed SGLang and serves DFLASH without the entry point."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.generation import generate
from tests.support.prompts import corpus
from tests.support.servers import dflash_server

pytest.importorskip("sglang")
pytestmark = pytest.mark.sglang

ROOT = Path(__file__).parents[2]
PATCH = ROOT / "patches" / "register-plugin.patch"
(FILE,) = re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text(), flags=re.MULTILINE)


@pytest.mark.engine
@pytest.mark.slow
def test_a_patched_tree_serves_dflash_without_the_entry_point(tmp_path: Path) -> None:
    """Links to the installed files, and a real copy of the patched one."""
    spec, tree = importlib.util.find_spec("sglang"), tmp_path / "tree"
    assert spec is not None and spec.submodule_search_locations
    (installed,) = map(Path, spec.submodule_search_locations)
    tree.mkdir()
    subprocess.run(["cp", "--recursive", "--symbolic-link", str(installed), str(tree)], check=True)
    (tree / FILE).unlink()
    shutil.copy(installed.parent / FILE, tree / FILE)
    subprocess.run(["patch", "-p1", "-d", str(tree), "-i", str(PATCH)], check=True, capture_output=True)
    path = os.pathsep.join([str(tree), str(ROOT), str(ROOT / "cpu_platform"), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "SGLANG_PLUGINS": "none", "SGLANG_PLATFORM": "dflash_cpu"}
    with dflash_server("tiny-dense", tmp_path, **environment) as server:
        answer = generate(server, corpus("tiny-dense", 1)[0])
        assert answer.meta["spec_verify_ct"] < len(answer.tokens)
        assert "Executed general plugin" not in server.log
