"""A plugin that cannot register must not leave DFLASH to another worker: the loader only logs what it raises."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash import plugin
from sglang_dflash.errors import DFlashError


class _Algorithm:
    def __init__(self, dflash: bool) -> None:
        self._dflash = dflash

    def is_dflash(self) -> bool:
        return self._dflash


def test_failed_registration_refuses_dflash_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dflash.upstream import HookRegistry

    def fail() -> None:
        raise ImportError("cannot import name 'gone'")

    monkeypatch.setattr(HookRegistry, "_hooks", {plugin.CREATE_WORKER: []})
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setattr(plugin, "_register_hooks", fail)
    with pytest.raises(ImportError):
        plugin.register()
    [(_, refuse, _)] = HookRegistry._hooks[plugin.CREATE_WORKER]

    def original(algorithm: Any, server_args: Any) -> str:
        return "builtin"

    assert refuse(original, _Algorithm(dflash=False), None) == "builtin"
    with pytest.raises(DFlashError, match="cannot import name 'gone'"):
        refuse(original, _Algorithm(dflash=True), None)
