"""What the test plugin's modes hook exists: SGLang only logs a hook whose target is gone, and the mode does nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.support.preloaded import run
from tests.support.servers import path_with

pytestmark = pytest.mark.sglang

PROGRAM = """
import inspect, os, pkgutil
import dflash_test_plugin
from dflash_test_plugin import changes, probe
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
HookRegistry._hooks.clear()
own = (name for module in (changes, probe) for name, function in vars(module).items()
       if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_"))
os.environ["SGLANG_DFLASH_TEST_PLUGIN"] = ",".join([*own, "streams"])
dflash_test_plugin.register()
for target in HookRegistry._hooks:
    assert callable(pkgutil.resolve_name(target))
print(os.environ["SGLANG_DFLASH_TEST_PLUGIN"], len(HookRegistry._hooks))
"""


def test_every_mode_hooks_what_exists(tmp_path: Path) -> None:
    (tmp_path / "copy_rule.json").write_text(json.dumps({"least": 2, "margin": 99}))
    paths = {"PYTHONPATH": path_with("plugin", ".."), "SGLANG_DFLASH_TEST_FOLDER": str(tmp_path)}
    paths["SGLANG_DFLASH_TEST_DIES"] = "BEFORE sglang_dflash.worker.forwards.Verify.verify"
    done = run("-c", PROGRAM, environment={**os.environ, **paths})
    assert done.returncode == 0, done.stderr[-3000:]
    modes, targets = done.stdout.split()[-2:]
    assert len(modes.split(",")) == 24 and int(targets) > 25
