"""Measured rows as JSON lines, and the page that is written from them. Needs the standard library only.

A row says in ``what`` which table it belongs to. It is written as it is measured, so a call that is cut off keeps it.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
FILE = "rows.jsonl"
PAGE = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
OURS, BUILTIN, PLAIN = "planned", "builtin", "plain"
FA3 = "fa3 "  # begins an arm with SGLang's default attention on Hopper, for target and drafter
# Bytes per second of a large copy, in TB, by what the card's name contains.
RATES = {"H200": 4.3, "H100": 3.0}


def rate_of(card: str) -> float:
    return next((rate for name, rate in RATES.items() if name in card), RATES["H100"])


def append(folder: Path, **row: Any) -> None:
    """Write a row; threads and processes may write to the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(folder: Path) -> list[Row]:
    """Return the rows of every call in ``folder``, a file each, without a line that a killed process cut off."""
    rows = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                rows.append({"call": path.stem, **json.loads(line)})
            except json.JSONDecodeError:
                continue
    return rows


def page(rows: Sequence[Row]) -> str:
    """Return the results in Markdown, a section for each kind of row."""
    failed = [row for row in rows if "error" in row and row["what"] != "fault"]
    good, sections = [row for row in rows if row not in failed], [PAGE["header"]]
    tokens = partial(step_lines, value="tokens_s", over=OURS)
    lines_of = {"steps": step_lines, "tokens": tokens, "micro": micro_lines}
    for what, about in PAGE["tables"].items():
        lines = [row for row in good if row["what"] == what]
        columns = ["call", *about["columns"].split()] if "columns" in about else []
        if what in lines_of:
            lines = lines_of[what](lines)
            columns = sorted({name for line in lines for name in line}, key=_place)
        if lines:
            sections += [f"## {about['heading']}", *filter(None, [about.get("text")]), table(lines, columns)]
    if failed:
        short = [{**row, "error": row["error"].strip().splitlines()[-1]} for row in failed]
        sections += ["## What failed", table(short, ("call", "what", "job", "batch", "error"))]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def table(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """Return a table of the columns that some row has; of one call without its name."""
    rows = list(rows)
    columns = [column for column in columns if any(row.get(column) is not None for row in rows)]
    if len({row.get("call") for row in rows}) == 1 and "call" in columns:
        columns.remove("call")
    lines = [columns, ["---"] * len(columns), *[[cell(row.get(name)) for name in columns] for row in rows]]
    return "<!-- measure: make gpu -->\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return f"{median(value):.2f} [{min(value):.2f}, {max(value):.2f}]"
    if isinstance(value, list | dict):
        each = value.items() if isinstance(value, dict) else zip([""] * len(value), value, strict=True)
        value = ", ".join(f"{name[:40]} {cell(one)}".strip() for name, one in each)
    text = f"{value:.2f}" if isinstance(value, float) else "" if value is None else str(value)
    return text.replace("|", "/").replace("\n", " ")[:600]


def pivoted(rows: Sequence[Row], keys: Sequence[str], column: Callable[[Row], str], value: str) -> list[Row]:
    """Return a line per combination of ``keys``, with a column for each name of ``column``."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in keys)
        lines.setdefault(key, dict(zip(keys, key, strict=True)))[column(row)] = row[value]
    return list(lines.values())


def step_lines(rows: Sequence[Row], value: str = "step_ms", over: str = BUILTIN) -> list[Row]:
    """Return step times by call, pair and batch, with ratios to the arm ``over`` of the same call."""
    lines = pivoted(rows, ("call", "pair", "batch"), _arm, value)
    for line in lines:
        for arm in sorted({*line} & {*map(_arm, rows)}):
            other = f"{FA3}{over}" if arm.startswith(FA3) else over
            if other in line and not arm.endswith((over, PLAIN)):
                line[f"{arm} / {other}"] = median(line[arm]) / median(line[other])
    return lines


def _arm(row: Row) -> str:
    return row["arm"] if row.get("states") in (None, row["arm"]) else f"{row['arm']} ({row['states']})"


def micro_lines(rows: Sequence[Row]) -> list[Row]:
    """Return the microbenchmark by item and model, a column per batch."""
    times = [{**row, "us": f"{row['us']:.1f} ({row['floor_us']:.1f})"} for row in rows]
    return pivoted(times, ("call", "item", "sizes"), lambda row: str(row["batch"]), "us")


def _place(column: str) -> tuple[int, int, str]:
    """Keys, then columns of arms or batches, then ratios."""
    keys = ("call", "item", "pair", "sizes", "batch", PLAIN, BUILTIN)
    place = keys.index(column) if column in keys else len(keys) + (" / " in column)
    return place, int(column) if column.isdigit() else 0, column
