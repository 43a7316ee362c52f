"""The distributions: what each imports, and the core alone, which leaves a CPU machine to SGLang."""

from __future__ import annotations

import ast
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from sglang_dflash import __version__
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import installed_plugins
from tests.house.test_imports import imports
from tests.launch.test_changed_sglang import AS_IT_IS, call_it, resolve
from tests.support.preloaded import run

ROOT = Path(__file__).parents[2]
# Distributions that an installed SGLang has, whatever build of it: the core names no version of them.
WITH_SGLANG = {
    *("sglang", "torch", "triton", "transformers", "safetensors", "huggingface_hub", "compressed_tensors"),
    *("numpy", "prometheus_client", "psutil"),
}


def test_the_core_declares_what_it_imports() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0] for line in project["dependencies"]}  # type: ignore[index]
    trees = [ast.parse(path.read_text()) for path in (ROOT / "sglang_dflash").rglob("*.py")]
    used = {name.partition(".")[0] for tree in trees for _, name in imports(tree)}
    assert used - sys.stdlib_module_names - {"sglang_dflash"} - WITH_SGLANG == declared


EVERY_MODULE = """
import importlib, pkgutil, sys
sys.modules["tests"] = sys.modules["tools"] = None
for package in ("sglang_dflash", "sglang_dflash_cpu", "sglang_dflash_lab"):
    for module in pkgutil.walk_packages(importlib.import_module(package).__path__, package + "."):
        importlib.import_module(module.name)
print(len(sys.modules))
"""


@pytest.mark.sglang
def test_every_module_imports_without_the_tests_and_the_tools() -> None:
    ended = run("-c", EVERY_MODULE)
    assert ended.returncode == 0, ended.stderr[-3000:]


@pytest.mark.sglang
def test_without_an_accelerator_the_core_refuses_dflash_by_naming_the_remedy(tmp_path: Path) -> None:
    """The other two distributions have no entry points there."""
    path = [call_it(name, __version__, tmp_path) for name in ("sglang_dflash_cpu", "sglang_dflash_lab")]
    program = AS_IT_IS.replace("[1:3]", "[1:]")  # SGLang cannot decode plainly there either
    refused = resolve(program, tmp_path, path=os.pathsep.join([path[0], str(ROOT)]), CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 1
    remedy = "Fix: (install an NVIDIA driver|run `pip install ./cpu_platform`) "
    assert re.search(f"{DFlashError.__name__}: .* {remedy}", refused.stderr.splitlines()[-1]), refused.stderr


HOOKED = """
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.server_args import ServerArgs
load_plugins()
print("hooked", *resolution_hooks._HOOKS, *HookRegistry._hooks)
"""


@pytest.mark.sglang
@pytest.mark.parametrize("variable", ["SGLANG_PLUGINS", "SGLANG_PLATFORM"])
def test_a_variable_that_names_another_plugin_switches_this_package_off_in_whole(variable: str, tmp_path: Path) -> None:
    path = Path(call_it("other", "1", tmp_path))
    (path / "other-1.dist-info" / "entry_points.txt").write_text("[sglang.srt.platforms]\nother = other:activate\n")
    (path / "other.py").write_text("def activate():\n    return 'sglang.srt.platforms.cpu.CpuSRTPlatform'\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(path), str(ROOT)]), variable: "other"}
    ended = run("-c", HOOKED, environment=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.splitlines()[-1] == "hooked"


def test_the_installed_entry_points_are_those_of_the_projects() -> None:
    """Both are called ``dflash``, so that ``SGLANG_PLUGINS`` lets in or keeps out both."""
    declared = {}
    for folder in (ROOT, ROOT / "cpu_platform"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for group, points in project["entry-points"].items():
            declared |= {(group, name): value for name, value in points.items()}
    installed = {(each.group, each.name): each.value for each in installed_plugins()}
    assert {key: installed.get(key) for key in declared} == declared, "run `make setup` again"
    ours = [group for group, name in sorted(declared) if name == "dflash"]
    assert ours == ["sglang.srt.platforms", "sglang.srt.plugins"]
