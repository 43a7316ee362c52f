"""An SGLang plugin for tests: looks into a server, or changes what it does, in the modes that a test names.

A server loads it when ``tests/plugin`` is on PYTHONPATH. ``SGLANG_DFLASH_TEST_PLUGIN`` names the modes, separated by
commas: functions of ``probe``, ``changes``, ``overlap`` and ``policies``. ``SGLANG_DFLASH_TEST_FOLDER`` is the folder
that they write to or read from. With ``SGLANG_DFLASH_TEST_STRICT`` a wait for the device inside a step raises.
"""

from __future__ import annotations

import os
from importlib import import_module

PLACES = {
    **dict.fromkeys(("streams", "refusals"), ("overlap",)),
    **dict.fromkeys(("random_width", "widest"), ("policies",)),
}


def register() -> None:
    if os.environ.get("SGLANG_DFLASH_TEST_STRICT"):
        import_module("dflash_test_plugin.host_waits").install()
    asked = [*filter(None, os.environ.get("SGLANG_DFLASH_TEST_PLUGIN", "").split(","))]
    for mode in asked:
        modules = (
            vars(import_module(f"dflash_test_plugin.{place}")) for place in PLACES.get(mode, ("probe", "changes"))
        )
        next(module[mode] for module in modules if mode in module)()
