"""Measured rows as JSON lines, and the page that is written from them. Needs the standard library only.

A row says in ``what`` which table it belongs to. It is written as it is measured, so a call that is cut off keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
FILE = "rows.jsonl"
HEADER = """# On a GPU

Written by [the kit](../development.md#a-gpu-without-sglang) from the rows in `docs/results/gpu/`, a file per call.
Servers run with Triton attention, because FA3 and FlashInfer are not in the wheelhouse, and with SGLang's compiled
modules. The ratio of two workers is fair; absolute times are not those of a full installation.

```bash
make gpu OUT=results/gpu              # measures: rows, and a page of them
make gpu PAGE=docs/results/gpu        # writes this page
```
"""
# What -> heading, text, columns. A row of this kind is a line of the table.
TABLES = {
    "machine": (
        "Machine",
        "",
        "date gpu memory_mib floor_tb_s driver python torch triton sglang kernels commit random",
    ),
    "fault": ("Faults", "", "where error mended"),
    "texts": (
        "Texts against plain decoding",
        "Each prompt twice: eight requests at once, then one. `wrong`: texts that differ from the plain ones, except\n"
        "at a near-tie of the target. `bits` (exact mode): texts whose tokens or log-probabilities are not identical.\n"
        "`widths`: steps by width.",
        "pair arm states texts wrong near_ties bits accept widths",
    ),
    "cases": ("Kernels against their definitions", "", "files result"),
    "host": (
        "Host time",
        "Milliseconds per scheduler loop of a decode step; `wait_ms`: the host waits for the device.",
        "pair arm batch loop_ms run_batch_ms process_ms wait_ms",
    ),
    "profile": (
        "Profile of a step",
        "Per step, under torch's profiler. `idle`: the device's share of time without a kernel.",
        "pair arm batch kernels launches graph_launches copies idle longest_ms",
    ),
    "start": ("Starts", "Seconds, while other servers start.", "pair arm seconds parts"),
    "costs": (
        "Costs by width",
        "What the adaptive policy measures: ms of a step.",
        "pair batch milliseconds calibration_s",
    ),
    "modules": ("SGLang's compiled modules", "", "handed_out missing"),
    "end": ("End", "", "seconds errors cut_off"),
}
STEPS = (
    "Milliseconds of a decode step of random weights: block 16, simulated accept length 4, prompts of 128 tokens; of\n"
    "plain decoding: a token. Median [range]. A ratio is an arm's median over that of SGLang's worker (`builtin`)."
)
MICRO = (
    "One layer's launches in a CUDA graph over all layers: microseconds per layer (floor: each byte once, at\n"
    "`floor_tb_s`), by requests. `layer`: everything between a layer's projections."
)
OURS, BUILTIN, PLAIN = "planned", "builtin", "plain"
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
    good, sections = [row for row in rows if row not in failed], [HEADER]
    for what, (heading, text, columns) in TABLES.items():
        if chosen := [row for row in good if row["what"] == what]:
            sections += [f"## {heading}", *filter(None, [text]), table(chosen, ["call", *columns.split()])]
        if what == "texts":
            sections += _pivot("Step times", STEPS, step_lines(rows))
    sections += _pivot("One layer of a verify", MICRO, micro_lines(good))
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


def step_lines(rows: Sequence[Row]) -> list[Row]:
    """Return step times by call, pair and batch, with ratios to SGLang's worker of the same call."""
    times = [row for row in rows if row["what"] == "steps" and "error" not in row]
    lines = pivoted(times, ("call", "pair", "batch"), _arm, "step_ms")
    for line in lines:
        for arm in [arm for arm in {*map(_arm, times)} - {BUILTIN, PLAIN} if arm in line and BUILTIN in line]:
            line[f"{arm} / {BUILTIN}"] = median(line[arm]) / median(line[BUILTIN])
    return lines


def _arm(row: Row) -> str:
    return row["arm"] if row.get("states") in (None, row["arm"]) else f"{row['arm']} ({row['states']})"


def micro_lines(rows: Sequence[Row]) -> list[Row]:
    """Return the microbenchmark by item and model, a column per batch."""
    times = [{**row, "us": f"{row['us']:.1f} ({row['floor_us']:.1f})"} for row in rows if row["what"] == "micro"]
    return pivoted(times, ("call", "item", "sizes"), lambda row: str(row["batch"]), "us")


def _pivot(heading: str, text: str, lines: list[Row]) -> list[str]:
    columns = sorted({name for line in lines for name in line}, key=_order)
    return [f"## {heading}", text, table(lines, columns)] if lines else []


def _order(column: str) -> tuple[int, int, str]:
    """Keys, then columns of arms or batches, then ratios."""
    keys = ("call", "item", "pair", "sizes", "batch", PLAIN, BUILTIN)
    place = keys.index(column) if column in keys else len(keys) + (" / " in column)
    return place, int(column) if column.isdigit() else 0, column
