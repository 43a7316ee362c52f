"""Rows of a results file as a benchmark writes them, with chosen figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.load import Cell

SETTINGS = {"pair": "tiny-hybrid", "target": "t", "drafter": "d", "modes": [], "num_prompts": 2, "max_tokens": 8}
PROVENANCE = {
    "command": "sglang-dflash bench",
    "time": "now",
    "commit": "abc",
    "versions": {"sglang": "0", "sglang-dflash": "0"},
    "hardware": {"cpu": "c", "cores": 2, "memory_gib": 1.0, "gpus": []},
    "environment": {},
}


def run(cell: Cell, speed: float, texts: list[str], **more: Any) -> dict[str, Any]:
    """One run's row."""
    names = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
    figures = {"output_throughput": speed, "duration": 1.0, "accept_length": None, **dict.fromkeys(names, 5.0)}
    return {**vars(cell), **figures, "generated_texts": texts, "load_average": 0.5, "worker": {}, **more}


def write(folder: Path, speeds: dict[str, list[float]], texts: dict[str, list[str]], temperature: float = 0.0) -> None:
    """Write a results file: each mode's tokens/s by repeat, and its answers."""
    settings = {**SETTINGS, "temperature": temperature}
    results.append(folder, "provenance", {**PROVENANCE, "settings": settings})
    for mode, values in speeds.items():
        worker = {"steps_by_width": {"16": 3, "8": 1}} if mode != "ar" else {}
        for repeat, speed in enumerate(values):
            accept = None if mode == "ar" else 4.0
            row = run(Cell(mode, "math", 1, repeat), speed, texts[mode], accept_length=accept, worker=worker)
            results.append(folder, "run", row)
