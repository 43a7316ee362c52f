"""Results as JSON lines, a file per step, written as they come so that a killed run keeps them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def append(folder: Path, step: str, row: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{step}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(folder: Path, step: str) -> list[Row]:
    """Rows of a step, oldest first, without a line that a killed run cut off."""
    path = folder / f"{step}.jsonl"
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def latest(rows: list[Row], *keys: str) -> list[Row]:
    """The newest row for each combination of ``keys``, in order of first appearance."""
    newest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        newest[tuple(row.get(key) for key in keys)] = row
    return list(newest.values())
