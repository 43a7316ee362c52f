"""The page of results: a section for each step that has rows from a real device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from tools.gpu import records
from tools.gpu.records import Row, latest

MIB = 1 << 20
HEADER = """# On a GPU

Measured with [the kit](../development.md#a-gpu-without-sglang): `make gpu`.
"""


def page(out: Path, device: str = "cuda") -> str | None:
    """The page in Markdown, None without rows of this device. Only those of a real one are a result."""
    sections: list[str] = []
    for step, (title, make, note) in SECTIONS.items():
        if rows := [row for row in records.read(out, step) if row["device"] == device]:
            command = f"<!-- measure: make gpu STEPS={step} -->"
            sections += [f"## {title}\n", f"{command}\n", make(rows), *([f"{note}\n"] if note else [])]
    return "\n".join([HEADER, *sections]) if sections else None


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *[[_cell(value) for value in row] for row in rows]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value).replace("|", "/").replace("\n", " ")[:120]


def plain(*keys: str) -> Callable[[list[Row]], str]:
    """A table of the newest row for each value of the first key, a column per key."""
    return lambda rows: table(keys, [[row.get(key) for key in keys] for row in latest(rows, keys[0])])


def pivot(down: str, across: str, cell: Callable[[Row], str]) -> Callable[[list[Row]], str]:
    """A table with a row per value of ``down`` and a column per value of ``across``, from the newest rows."""

    def make(rows: list[Row]) -> str:
        found = {(row[down], row[across]): cell(row) for row in latest(rows, down, across)}
        downs, columns = (list(dict.fromkeys(key[index] for key in found)) for index in (0, 1))
        return table([down, *columns], [[name, *[found.get((name, column)) for column in columns]] for name in downs])

    return make


def machine(rows: list[Row]) -> str:
    packages = ("torch", "triton", "sglang", "sglang-dflash")
    columns = ("gpu", "driver", "cuda", "python", *packages, "commit")
    return table(columns, [[(row | row["packages"])[name] for name in columns] for row in rows[-1:]])


def kernels(rows: list[Row]) -> str:
    return plain("kernel", "cases", "failed")([row for row in rows if "kernel" in row])


def nosync(rows: list[Row]) -> str:
    return table(("pair", "result"), [[row["pair"], _tokens(row)] for row in latest(rows, "pair")])


def _tokens(row: Row) -> str:
    return ", ".join(f"{kind} {count} tokens" for kind, count in row.get("tokens", {}).items()) or "error"


def card(rows: list[Row]) -> str:
    columns = ("pair", "start, s", "steps", "ms a step", "states", "accept length")
    keys = ("pair", "start_seconds", "steps", "step_ms", "states", "accept")
    found = [row for row in latest(rows, "pair") if "steps" in row]
    return table(columns, [[row[key] for key in keys] for row in found]) + "\n" + memory(rows)


def memory(rows: list[Row]) -> str:
    parts = ("target_weights", "drafter_weights", "target_kv", "draft_kv", "states", "scratch")
    found = [row for row in latest(rows, "pair") if "memory_bytes" in row]
    sizes = [[*[row["memory_bytes"][part] for part in parts], row["sum"], row["taken"] or 0] for row in found]
    body = [[row["pair"], *[size / MIB for size in each]] for row, each in zip(found, sizes, strict=True)]
    return table(["pair, MiB", *parts, "sum", "taken"], body)


def engine_cell(row: Row) -> str:
    if "texts" not in row:
        return f"{row['tokens_per_second']} tok/s" if "tokens_per_second" in row else "error"
    accept = f", accept length {row['accept']:.2f}" if row.get("accept") else ""
    return f"{row['texts']} texts, {row['near_ties']} near-ties, {row['wrong']} wrong{accept}"


def replay(rows: list[Row]) -> str:
    """A row per arm, a column per attention backend; plain decoding is not among them."""
    return pivot("arm", "backend", engine_cell)([row for row in rows if "backend" in row])


def engine(rows: list[Row]) -> str:
    named = [{**row, "arm": f"{row['arm']}, {row['backend']}" if "backend" in row else row["arm"]} for row in rows]
    return pivot("pair", "arm", engine_cell)(named)


def steptimes(rows: list[Row]) -> str:
    """A row per pair, a column per batch size: milliseconds of both workers, and ours over the builtin's."""
    cells: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if "step_ms" in row:
            pair = f"{row['pair']}, {row['layers']} layers" if row["layers"] else row["pair"]
            cell = cells.setdefault((pair, row["batch"]), {"pair": pair, "batch": f"batch {row['batch']}"})
            cell[row["arm"]] = row["step_ms"]
    return pivot("pair", "batch", steptimes_cell)(list(cells.values()))


def steptimes_cell(row: Row) -> str:
    ours, builtin = row.get("ours"), row.get("builtin")
    ratio = f" = {median(ours) / median(builtin):.2f}" if ours and builtin else ""
    return f"{_spread(ours)} / {_spread(builtin)}{ratio}"


def _spread(values: list[float] | None) -> str:
    return f"{median(values):.2f} [{min(values):.2f}, {max(values):.2f}]" if values else "-"


def profile(rows: list[Row]) -> str:
    found = latest([row for row in rows if "trace" in row], "pair", "arm")
    longest = ["; ".join(f"{name[:30]} {ms} ms" for name, ms in [*row["kernels_ms"].items()][:3]) for row in found]
    body = [[row["pair"], row["arm"], row["mib"], names] for row, names in zip(found, longest, strict=True)]
    return table(["pair", "worker", "trace, MiB", "longest kernels"], body)


def summary(out: Path) -> list[str]:
    """Status of each step, and the errors of those that failed: printed at the end of a run."""
    last = latest(records.read(out, "steps"), "step")
    failed = [row["step"] for row in last if row["status"] == "failed"]
    rows = [(step, row) for step in failed for row in records.read(out, step)[-20:] if row.get("error")]
    errors = [f"{step}: {row['error'].strip().splitlines()[-1][:300]}" for step, row in rows]
    return [
        table(("step", "status", "seconds"), [[row["step"], row["status"], row["seconds"]] for row in last]),
        *errors,
    ]


TIES = "*Near-ties*: texts that differ from plain decoding's where the target is nearly undecided. *Wrong*: elsewhere."
# Step -> title, table and note.
SECTIONS: dict[str, tuple[str, Callable[[list[Row]], str], str]] = {
    "machine": ("The machine", machine, ""),
    "kernels": ("Kernels against their definitions", kernels, ""),
    "replay": (
        "States replayed in graphs, against plain decoding, bfloat16",
        replay,
        TIES,
    ),
    "card": ("A 27B's card, random weights", card, ""),
    "steptimes": (
        "A step's time at the published dimensions",
        steptimes,
        "Random weights, simulated accept length 4, block 16; median [range] in milliseconds, ours / builtin = ratio. "
        "Both workers run on the kit's\nstand-ins for SGLang's compiled kernels: the ratio is fair, the times are not "
        "SGLang's best ([why](../development.md#a-gpu-without-sglang)).",
    ),
    "nosync": ("Steps in which a wait raises", nosync, ""),
    "profile": ("Where a step's time goes", profile, ""),
    "engine": ("Tiny pairs against plain decoding, bfloat16", engine, TIES),
    "memory": (
        "Memory",
        memory,
        "*Sum*: allocated, as our worker reports it. *Taken*: missing on the device after the start, CUDA's own and "
        "graphs included.",
    ),
    "sanitizer": ("compute-sanitizer", plain("tool", "errors", "skipped"), ""),
}
