"""Measured rows as JSON lines, and the page that is written from them. Needs the standard library only.

A row says in ``what`` which table it belongs to. It is written as it is measured, so a call that is cut off keeps it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
FILE = "rows.jsonl"
HEADER = """# On a GPU

Written by [the kit](../development.md#a-gpu-without-sglang) from the rows in `docs/results/gpu/`, a file per call. Servers run
with Triton attention, because FA3 and FlashInfer are not in the wheelhouse, and with SGLang's compiled modules. The ratio of
two workers is fair; absolute times are not those of a full installation.

```bash
make gpu                                         # measures; OUT has the rows and a page of them
python -m tools.gpu --page docs/results/gpu      # this page
```
"""
# What -> heading, text, columns. A row of this kind is a line of the table.
TABLES: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "machine": (
        "Machine",
        "",
        (
            *("date", "gpu", "memory_mib", "floor_tb_s", "driver", "python", "torch", "triton", "sglang", "kernels"),
            *("commit", "random"),
        ),
    ),
    "fault": ("Faults", "", ("pair", "arm", "error", "mended")),
    "texts": (
        "Texts against plain decoding",
        "Each prompt twice: eight requests at once, then one. `wrong`: texts that differ from plain decoding's elsewhere "
        "than at a near-tie of the target. `bits`: texts whose tokens or log-probabilities are not bit-identical (exact "
        "mode).",
        ("pair", "arm", "states", "texts", "wrong", "near_ties", "bits", "accept", "widths"),
    ),
    "cases": ("Kernels against their definitions", "", ("files", "result")),
    "host": (
        "Host time",
        "Milliseconds per scheduler loop of a decode step; `wait`: the host waits for the device.",
        ("pair", "arm", "batch", "loop_ms", "run_batch_ms", "process_ms", "wait_ms"),
    ),
    "profile": (
        "Profile of a step",
        "Per step, under torch's profiler. `idle`: the device's share of time without a kernel, from the first kernel to "
        "the last.",
        ("pair", "arm", "batch", "kernels", "launches", "graph_launches", "copies", "idle", "longest_ms"),
    ),
    "start": ("Starts", "Seconds, with the other servers of the call starting.", ("pair", "arm", "seconds", "parts")),
    "costs": (
        "Costs by width",
        "What the adaptive policy measures at its start: milliseconds of a step.",
        ("pair", "batch", "milliseconds", "calibration_s"),
    ),
    "modules": ("SGLang's compiled modules", "", ("packed", "loaded", "handed_out", "missing")),
    "call": ("Call", "", ("seconds", "rows", "errors", "cut_off")),
}
STEPS = (
    "Milliseconds of a decode step of random weights: block 16, simulated accept length 4, prompts of 128 tokens; plain "
    "decoding: of a token. Median [range]. A ratio is an arm's median over that of SGLang's worker (`builtin`)."
)
MICRO = (
    "One layer's launches in a CUDA graph over all layers, microseconds per layer (floor: each byte once, at `floor_tb_s` "
    "of `machine`). `layer`: everything between a layer's projections."
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
    good = [row for row in rows if "error" not in row or row["what"] == "fault"]
    sections = [HEADER]
    for what, (heading, text, columns) in TABLES.items():
        chosen = [row for row in good if row["what"] == what]
        if chosen:
            sections += [f"## {heading}", *filter(None, [text]), table(chosen, ("call", *columns))]
        if what == "texts":
            sections += _steps([row for row in good if row["what"] == "steps"])
    sections += _micro([row for row in good if row["what"] == "micro"])
    failed = [row for row in rows if "error" in row and row["what"] != "fault"]
    if failed:
        short = [{**row, "error": row["error"].strip().splitlines()[-1]} for row in failed]
        sections += ["## What failed", table(short, ("what", "job", "pair", "arm", "error"))]
    return "\n\n".join(section.strip() for section in sections) + "\n"


def table(rows: Iterable[Row], columns: Sequence[str]) -> str:
    """Return a table of the columns that some row has; of one call without its name."""
    rows = list(rows)
    columns = [column for column in columns if any(row.get(column) is not None for row in rows)]
    if len({row.get("call") for row in rows}) == 1 and "call" in columns:
        columns.remove("call")
    lines = [columns, ["---"] * len(columns), *[[cell(row.get(name)) for name in columns] for row in rows]]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list) and value and isinstance(value[0], float):
        return f"{median(value):.2f} [{min(value):.2f}, {max(value):.2f}]"
    if isinstance(value, list):
        value = ", ".join(map(cell, value))
    if isinstance(value, dict):
        value = ", ".join(f"{name[:40]} {cell(each)}" for name, each in value.items())
    text = f"{value:.2f}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return text.replace("|", "/").replace("\n", " ")[:600]


def _steps(rows: Sequence[Row]) -> list[str]:
    """Return the section of step times: a line per call, pair and batch, and a column per arm."""
    times: dict[tuple[str, str, int], dict[str, list[float]]] = {}
    for row in rows:
        name = row["arm"] if row.get("states") in (None, row["arm"]) else f"{row['arm']} ({row['states']})"
        times.setdefault((row["call"], row["pair"], row["batch"]), {})[name] = row["step_ms"]
    arms = list(dict.fromkeys(arm for each in times.values() for arm in each))
    ours = [arm for arm in arms if arm not in (BUILTIN, PLAIN)]
    lines = []
    for (call, pair, batch), each in times.items():
        line: Row = {"call": call, "pair": pair, "batch": batch, **each}
        for arm in ours:
            if arm in each and BUILTIN in each:
                line[f"{arm} / {BUILTIN}"] = median(each[arm]) / median(each[BUILTIN])
        lines.append(line)
    columns = ("call", "pair", "batch", *arms, *(f"{arm} / {BUILTIN}" for arm in ours))
    return ["## Step times", STEPS, table(lines, columns)] if rows else []


def _micro(rows: Sequence[Row]) -> list[str]:
    """Return the section of the microbenchmark: a line per item and model, a column per batch."""
    batches = [str(batch) for batch in sorted({row["batch"] for row in rows})]
    lines: dict[tuple[str, str], Row] = {}
    for row in rows:
        line = lines.setdefault((row["item"], row["sizes"]), {"item": row["item"], "sizes": row["sizes"]})
        line[str(row["batch"])] = f"{row['us']:.1f} ({row['floor_us']:.1f})"
    return ["## One layer of a verify", MICRO, table(lines.values(), ("item", "sizes", *batches))] if rows else []
