"""What `sglang-dflash pairs list` shows, read from the provenance files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_dflash.pairs import drafter_kinds, drafter_path, target_path
from sglang_dflash.pairs.corpus import TASKS


def pair_figures(name: str) -> dict[str, Any]:
    """Sizes in bytes, accuracy per task, accept lengths per drafter, task and block size."""
    target = target_path(name)
    return {
        "name": name,
        "target": {"path": str(target), "bytes": _size(target), "accuracy": _figures(target, "accuracy")},
        "drafters": {kind: _drafter_figures(name, kind) for kind in drafter_kinds(name)},
    }


def _drafter_figures(name: str, kind: str) -> dict[str, Any]:
    folder = drafter_path(name, kind)
    return {"path": str(folder), "bytes": _size(folder), "accept_lengths": _figures(folder, "accept_lengths")}


def _size(folder: Path) -> int:
    file = folder / "model.safetensors"
    return file.stat().st_size if file.exists() else 0


def _figures(folder: Path, key: str) -> dict[str, Any]:
    file = folder / "provenance.json"
    return json.loads(file.read_text()).get(key, {}) if file.exists() else {}


def print_table(figures: list[dict[str, Any]]) -> None:
    accuracy = Table(title="Targets: share of held-out prompts answered right (greedy, fp32)")
    for column in ("target", "MB", *TASKS):
        accuracy.add_column(column)
    accept = Table(title="Drafters: accept length at block 4 / 8 / 16 (greedy, fp32, reference decoder)")
    for column in ("target", "drafter", "MB", *TASKS):
        accept.add_column(column)
    for pair in figures:
        target = pair["target"]
        right = [target["accuracy"].get(task, {}).get("correct") for task in TASKS]
        accuracy.add_row(pair["name"], _mb(target), *("-" if r is None else f"{r:.0%}" for r in right))
        for kind, drafter in pair["drafters"].items():
            rows = [drafter["accept_lengths"].get(task, {}).get("accept_length", {}) for task in TASKS]
            accept.add_row(
                pair["name"],
                kind,
                _mb(drafter),
                *(" / ".join(f"{x:.1f}" for x in row.values()) or "-" for row in rows),
            )
    console = Console()
    console.print(accuracy)
    console.print(accept)


def _mb(model: dict[str, Any]) -> str:
    return f"{model['bytes'] / 1e6:.1f}"
