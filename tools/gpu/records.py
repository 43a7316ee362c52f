"""Measured rows as JSON lines, a file per step, and the page of results. Needs the standard library only.

Rows are written as they are measured, so a killed run keeps them.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

Row = dict[str, Any]
STATUS = "steps"
# A newer row replaces an older one with the same values of these.
KEYS = ("pair", "arm", "backend", "batch", "tool", "step")
HEADER = """# On a GPU

Measured with [the kit](../development.md#a-gpu-without-sglang). Pairs with published names have random weights and a
simulated accept length. Times are milliseconds, median [range]. Both workers run with Triton attention and the
`sgl_kernel` that `machine` names: their ratio is fair, their times are not SGLang's best.
"""


def append(folder: Path, step: str, row: Row) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f"{step}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def read(folder: Path, step: str) -> list[Row]:
    """Return the rows of a step, oldest first, without a line that a killed run cut off."""
    path, rows = folder / f"{step}.jsonl", []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def latest(rows: list[Row]) -> list[Row]:
    """Return the newest row for each combination of :data:`KEYS`, in order of first appearance."""
    return list({tuple(row.get(key) for key in KEYS): row for row in rows}.values())


def page(out: Path, steps: list[str], device: str = "cuda") -> str | None:
    """Return the results in Markdown, a section per step; None without rows of this device."""
    sections = []
    for step in steps:
        rows = latest([row for row in read(out, step) if row["device"] == device and "error" not in row])
        if rows:
            sections += [f"## {step}\n", f"<!-- measure: make gpu STEPS={step} -->\n", table(rows), *ratios(rows)]
    return "\n".join([HEADER, *sections]) if sections else None


def table(rows: list[Row]) -> str:
    hidden = ("device", "log", "error")
    columns = list(dict.fromkeys(name for row in rows for name in row if name not in hidden))
    lines = [columns, ["---"] * len(columns), *[[_cell(row.get(name, "-")) for name in columns] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], float):
        return f"{median(value):.2f} [{min(value):.2f}, {max(value):.2f}]"
    if isinstance(value, dict):
        value = ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
    text = f"{value:.2f}" if isinstance(value, float) else str(value)
    return text.replace("|", "/").replace("\n", " ")[:400]


def ratios(rows: list[Row]) -> list[str]:
    """Return our worker's step times relative to SGLang's, a line per pair and batch size with both."""
    timed = [row for row in rows if "step_ms" in row and "batch" in row]
    times = {(row["pair"], row["batch"], row["arm"]): median(row["step_ms"]) for row in timed}
    both = [cell for cell in times if cell[2] == "ours" and (*cell[:2], "builtin") in times]
    return [
        f"- {pair}, batch {batch}: ours / builtin = {times[pair, batch, 'ours'] / times[pair, batch, 'builtin']:.2f}\n"
        for pair, batch, _ in both
    ]


def summary(out: Path) -> str:
    """Return the status of each step, then the errors of steps that failed."""
    last = latest(read(out, STATUS))
    failed = [row["step"] for row in last if row["status"] == "failed"]
    errors = [(step, row["error"]) for step in failed for row in read(out, step)[-20:] if row.get("error")]
    return "\n".join([table(last), *(f"{step}: {error.strip().splitlines()[-1][:300]}" for step, error in errors)])
