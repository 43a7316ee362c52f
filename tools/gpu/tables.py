"""Tables of the rows in Markdown, and the page they go into: after ``<!-- measure: make gpu STEPS=NAME -->``."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu import records
from tools.gpu.records import Row, latest

NOT_MEASURED = "not measured"
PLACE = re.compile(r"(<!-- measure: make gpu STEPS=(\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
MIB = 1 << 20


def filled(page: str, out: Path) -> str:
    """The page with every table made again from the rows in ``out``."""
    return PLACE.sub(lambda found: found[1] + TABLES[found[2]](rows_of(out, found[2])) + found[3], page)


def rows_of(out: Path, step: str) -> list[Row]:
    """Rows of a real device: what a faked one or the CPU platform wrote is no result."""
    return [row for row in records.read(out, step) if row.get("device", "cuda") == "cuda"]


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Markdown; one row that says "not measured" if there are none."""
    rows = rows or [[NOT_MEASURED, *[""] * (len(columns) - 1)]]
    lines = [columns, ["---"] * len(columns), *[[_cell(value) for value in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:120]


def machine(rows: list[Row]) -> str:
    packages = ("torch", "triton", "sglang", "sglang-dflash")
    columns = ("gpu", "driver", "cuda", "python", *packages, "commit")
    return table(columns, [[(row | row["packages"])[name] for name in columns] for row in rows[-1:]])


def kernels(rows: list[Row]) -> str:
    def cell(row: Row) -> str:
        return f"{row['failed']} of {row['cases']} failed" if row["failed"] else f"{row['cases']} passed"

    return _pivot([{"on": "device", **row} for row in rows if "kernel" in row], "on", "kernel", cell)


def engine(rows: list[Row]) -> str:
    """One row per pair, a column per arm."""

    def cell(row: Row) -> str:
        if "texts" not in row:
            return f"{row['tokens_per_second']} tok/s" if "tokens_per_second" in row else "error"
        accept = f", accept length {row['accept']:.2f}" if row.get("accept") else ""
        return f"{row['texts']} texts, {row['near_ties']} near-ties, {row['wrong']} wrong{accept}"

    return _pivot(rows, "pair", "arm", cell)


def nosync(rows: list[Row]) -> str:
    return _pivot(rows, "pair", "requests", lambda row: "error" if "error" in row else f"{row['tokens']} tokens")


def memory(rows: list[Row]) -> str:
    parts = ("target_weights", "drafter_weights", "target_kv", "draft_kv", "states", "scratch")
    found = [row for row in latest(rows, "pair") if "memory_bytes" in row]
    body = [
        [row["pair"], *[row["memory_bytes"][part] / MIB for part in parts], row["sum"] / MIB, (row["taken"] or 0) / MIB]
        for row in found
    ]
    return table(["pair, MiB", *parts, "sum", "taken"], body)


def sanitizer(rows: list[Row]) -> str:
    return _plain(latest(rows, "tool"), "tool", "errors", "skipped")


def steptimes(rows: list[Row]) -> str:
    """One row per pair, a column per batch size: milliseconds of both workers, and ours over the builtin's."""
    measured = [row for row in rows if "step_ms" in row]
    by_cell: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for row in measured:
        by_cell.setdefault((row["pair"], row["layers"], row["batch"]), {})[row["arm"]] = row["step_ms"]
    both = [
        {"pair": f"{pair}, {layers} layers" if layers else pair, "batch": f"batch {batch}", "arms": arms}
        for (pair, layers, batch), arms in by_cell.items()
    ]

    def cell(row: Row) -> str:
        ours, builtin = row["arms"].get("ours"), row["arms"].get("builtin")
        ratio = f" = {median(ours) / median(builtin):.2f}" if ours and builtin else ""
        return f"{_spread(ours)} / {_spread(builtin)}{ratio}"

    return _pivot(both, "pair", "batch", cell)


def profile(rows: list[Row]) -> str:
    body = []
    for row in latest([row for row in rows if "trace" in row], "pair", "arm"):
        longest = list(row["kernels_ms"].items())[:3]
        body.append([row["pair"], row["arm"], row["mib"], "; ".join(f"{name[:30]} {ms} ms" for name, ms in longest)])
    return table(["pair", "worker", "trace, MiB", "longest kernels"], body)


def steps(rows: list[Row]) -> str:
    return _plain(latest(rows, "step"), "step", "status", "seconds")


def _plain(rows: list[Row], *keys: str) -> str:
    return table(keys, [[row.get(key) for key in keys] for row in rows])


def _pivot(rows: list[Row], down: str, across: str, cell: Callable[[Row], str]) -> str:
    """A row per value of ``down``, a column per value of ``across``, from the newest row of each combination."""
    found = {(row[down], row[across]): row for row in latest(rows, down, across)}
    downs, acrosses = (list(dict.fromkeys(key[index] for key in found)) for index in (0, 1))
    body = [
        [name, *[cell(found[name, other]) if (name, other) in found else None for other in acrosses]] for name in downs
    ]
    return table([down, *acrosses], body)


def _spread(values: list[float] | None) -> str | None:
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else None


def summary(out: Path) -> list[str]:
    """What a run prints at its end: how each step ended, and every error."""
    errors = [
        f"{step}: {row['error'].strip().splitlines()[-1][:300]}"
        for step in TABLES
        for row in records.read(out, step)
        if row.get("error")
    ]
    return [steps(records.read(out, "steps")), *errors]


TABLES: dict[str, Callable[[list[Row]], str]] = {
    "machine": machine,
    "kernels": kernels,
    "engine": engine,
    "nosync": nosync,
    "memory": memory,
    "sanitizer": sanitizer,
    "steptimes": steptimes,
    "profile": profile,
}
