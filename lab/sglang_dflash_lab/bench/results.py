"""``results.jsonl``, the lines of a benchmark.

Kinds: ``provenance`` (per invocation, with settings), ``server`` (per start) and ``run`` (the load generator's figures
and texts, the cell, our worker's counters).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Row = dict[str, Any]
FILE_NAME = "results.jsonl"


def append(folder: Path, kind: str, row: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    cut_off = path.exists() and not path.read_bytes().endswith(b"\n")  # a killed process wrote half a line
    with path.open("a") as file:
        file.write(("\n" if cut_off else "") + json.dumps({"kind": kind, **row}) + "\n")


def read(folder: Path, kind: str) -> list[Row]:
    path, rows = folder / FILE_NAME, []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.pop("kind") == kind:
            rows.append(row)
    return rows
