"""The two formats that results are written in, JSON lines and CSV, and the names of an arm's files."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one JSON object per line. Whole lines are on the disk when this returns."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_csv(path: Path, kind: type[DataclassInstance], rows: Sequence[DataclassInstance]) -> None:
    """Write dataclasses of one kind, their fields as headings."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(kind.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def file_name(label: str) -> str:
    """An arm's label as the stem of a file's name."""
    return re.sub(r"[^\w.-]", "_", label)
