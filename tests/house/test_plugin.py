"""A plugin that cannot register must not leave DFLASH to another worker: the loader only logs what it raises."""

from __future__ import annotations

import os
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import plugin
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import hooks
from sglang_dflash_cpu import arguments
from tests.house.contract import SYMBOLS
from tests.support.preloaded import run

pytestmark = pytest.mark.sglang

CREATE_WORKER = plugin.CREATE_WORKER


def test_failed_registration_refuses_dflash_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.upstream.launch import HookRegistry

    def fail() -> None:
        raise ImportError("cannot import name 'gone'")

    monkeypatch.setattr(HookRegistry, "_hooks", {CREATE_WORKER: []})
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "_register_hooks", fail)
    with pytest.raises(ImportError):
        plugin.register()
    [(_, refuse, _)] = HookRegistry._hooks[CREATE_WORKER]

    def original(algorithm: Any, server_args: Any) -> str:
        return "builtin"

    assert refuse(original, SimpleNamespace(is_dflash=lambda: False), None) == "builtin"
    with pytest.raises(DFlashError, match="cannot import name 'gone'"):
        refuse(original, SimpleNamespace(is_dflash=lambda: True), None)
    [refuse_arguments] = resolution_hooks._HOOKS["handle_model_source_paths"]  # before any weight
    refuse_arguments(SimpleNamespace(speculative_algorithm=None), lambda _: None)
    with pytest.raises(DFlashError, match="cannot import name 'gone'"):
        refuse_arguments(SimpleNamespace(speculative_algorithm="DFLASH"), lambda _: None)


def test_every_early_target_is_in_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.upstream.launch import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", defaultdict(list))
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(hooks, "_tables", [])
    plugin._register_hooks()
    arguments.install()
    assert set(HookRegistry._hooks) <= set(SYMBOLS)
    assert len(resolution_hooks._HOOKS) == 5
    assert set(resolution_hooks._HOOKS) <= {path.rpartition(".")[2] for path in SYMBOLS}


WITHOUT_A_SCHEDULER = """
import sys
import sglang.srt.managers.detokenizer_manager
from sglang.srt.plugins import load_plugins
before = set(sys.modules)
load_plugins()
print(*(name for name in sys.modules.keys() - before if name.startswith("sglang.")))
"""


def test_a_detokenizer_imports_no_scheduler_and_no_kernel() -> None:
    """As on an accelerator, without the CPU platform's own hooks: a kernel's module initialises the GPU on import."""
    done = run("-c", WITHOUT_A_SCHEDULER, environment={**os.environ, "SGLANG_PLUGINS": "dflash"})
    assert done.returncode == 0, done.stderr[-3000:]
    imported = done.stdout.splitlines()[-1].split() if done.stdout.strip() else []
    assert not [name for name in imported if "kernels" in name or "scheduler" in name or "mem_cache" in name]
