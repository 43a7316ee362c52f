"""A plugin is loaded before arguments are resolved, parsed or published, whoever does it."""

import argparse
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

folder = Path(tempfile.mkdtemp())
(folder / "probe.py").write_text("calls = []\ndef register():\n    calls.append(1)\n")
(folder / "probe-1.dist-info").mkdir()
(folder / "probe-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: probe\nVersion: 1\n")
(folder / "probe-1.dist-info" / "entry_points.txt").write_text("[sglang.srt.plugins]\nprobe = probe:register\n")
sys.path.insert(0, str(folder))

import probe  # noqa: E402
from sglang.srt import plugins, runtime_context  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

RESOLVED = SimpleNamespace(resolve_once=lambda: None)
for name, step in {
    "add_cli_args": lambda: ServerArgs.add_cli_args(argparse.ArgumentParser()),
    "resolve_once": lambda: ServerArgs(model_path="/no/such/model").resolve_once(),
    "publish": lambda: runtime_context.publish(RESOLVED, role="tokenizer"),
}.items():
    plugins._plugins_loaded = False
    probe.calls.clear()
    with suppress(Exception, SystemExit):  # of what follows
        step()
    assert probe.calls, f"{name}: no plugin is loaded"
