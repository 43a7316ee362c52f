"""Where a trained model comes from, written beside its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dflash_lab.bench.provenance import collect, describe_hardware
from sglang_dflash_lab.train.loop import LogEntry

FILE = "provenance.json"


def write_provenance(folder: Path, seed: int, log: list[LogEntry], validation: str, recipe: dict[str, Any]) -> None:
    """Write ``provenance.json`` to ``folder``.

    Args:
        validation: what the log's validation figure is, in words.
        recipe: the training's parameters.
    """
    run = collect(recipe)
    content = {
        "command": run["command"],
        "commit": run["commit"],
        "date": run["time"],
        "machine": describe_hardware(run["hardware"]),
        "versions": run["versions"] | {"tokenizers": version("tokenizers")},
        "seed": seed,
        "recipe": recipe,
        "minutes": round(log[-1].minutes, 1),
        "validation_is": validation,
        "log": [asdict(entry) for entry in log[:: max(1, len(log) // 20)]] + [asdict(log[-1])],
    }
    _write(folder, content)


def add_measurement(folder: Path, key: str, table: dict[str, Any]) -> None:
    """Add a table of ``measure`` to the folder's ``provenance.json``, with the command that made it."""
    content = read_provenance(folder) | {key: table, f"{key}_command": collect({})["command"]}
    _write(folder, content)


def read_provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def _write(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
