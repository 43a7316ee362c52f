"""A plugin that cannot register must not leave DFLASH to another worker: the loader only logs what it raises."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_dflash import enter, plugin
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import hooks
from sglang_dflash_cpu import arguments
from tests.house.contract import SYMBOLS
from tests.support.broken_pairs import Broken, write_pair
from tests.support.preloaded import run

pytestmark = pytest.mark.sglang

Failed = tuple[Callable[[Any], Any], Callable[[Any], None]]


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Failed:
    """Choose the worker and resolve arguments, where registration has failed."""
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.upstream.names import HookRegistry

    monkeypatch.setattr(HookRegistry, "_hooks", {plugin.CREATE_WORKER: []})
    monkeypatch.setattr(resolution_hooks, "_HOOKS", {})
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "_register_hooks", lambda: import_module("gone"))
    with pytest.raises(ImportError):
        plugin.register()
    assert not plugin.is_registered()
    [(_, worker, _)] = HookRegistry._hooks[plugin.CREATE_WORKER]
    [arguments] = resolution_hooks._HOOKS["handle_model_source_paths"]  # before any weight
    return (
        lambda dflash: worker(lambda *_: "builtin", SimpleNamespace(is_dflash=lambda: dflash), None),
        lambda name: arguments(SimpleNamespace(speculative_algorithm=name), lambda _: None),
    )


def test_failed_registration_refuses_dflash_and_nothing_else(failed: Failed) -> None:
    choose, resolve = failed
    assert choose(False) == "builtin"
    resolve(None)
    for refused in (lambda: choose(True), lambda: resolve("DFLASH")):
        with pytest.raises(DFlashError, match="No module named 'gone'") as raised:
            refused()
        assert raised.value.remedy.startswith("set SGLANG_DFLASH=builtin for SGLang's own worker, ")


def test_the_switch_restores_sglangs_worker_where_registration_failed(
    failed: Failed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH", "builtin")
    choose, resolve = failed
    resolve(None)
    assert not caplog.messages
    resolve("DFLASH")
    assert choose(True) == "builtin"
    [line] = caplog.messages
    assert line.startswith("DFLASH is served by SGLang's own worker, not by sglang-dflash: SGLANG_DFLASH=builtin. ")
    assert "No module named 'gone'" in line


# As entries of SGLang do that resolve first, and as processes do that never load plugins.
LAUNCH = """
import pickle, sys
from pathlib import Path
from sglang.srt.server_args import prepare_server_args
(args := prepare_server_args(sys.argv[2:])).resolve_once()
Path(sys.argv[1]).write_bytes(pickle.dumps(args))
"""
RECEIVE = """
import pickle, sys
from pathlib import Path
from sglang.srt.runtime_context import publish
publish(pickle.loads(Path(sys.argv[1]).read_bytes()), role=sys.argv[2])
from sglang_dflash.upstream.hooks import installed
print("installed", *installed())
"""


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory) -> str:
    write_pair(folder := tmp_path_factory.mktemp("pair"), Broken("fits", ""))
    pair = "--speculative-algorithm", "DFLASH", "--speculative-draft-model-path", str(folder / "drafter")
    done = run("-c", LAUNCH, str(folder / "args"), "--model-path", str(folder / "target"), *pair)
    assert done.returncode == 0, done.stderr[-3000:]
    return str(folder / "args")


@pytest.mark.parametrize(
    ("role", "hooked"),
    {
        "tokenizer": "managers.tokenizer_manager.TokenizerManager._stream_one_response",
        "detokenizer": "managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output",
        "scheduler": next(iter(enter.SCHEDULER_HOOKS.around)),
        "dp_controller": "",
    }.items(),
)
def test_arguments_bring_the_hooks_of_a_process_with_them(role: str, hooked: str, resolved: str) -> None:
    done = run("-c", RECEIVE, resolved, role)
    assert done.returncode == 0, done.stderr[-3000:]
    early = {target.removeprefix("sglang.srt.") for target, *_ in enter.HOOKS.functions()}
    added = {*done.stdout.splitlines()[-1].split()[1:]} - early
    assert hooked in added if hooked else not added


def test_every_early_target_is_in_the_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import resolution_hooks

    from sglang_dflash.upstream.names import HookRegistry

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
