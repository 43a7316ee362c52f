"""The table of ``sglang-dflash pairs list``, read from the provenance files beside the weights."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sglang_dflash_lab.pairs import drafter_kinds, drafter_path, target_path
from sglang_dflash_lab.pairs.corpus import TASKS


def pair_figures(name: str) -> dict[str, Any]:
    """Sizes in bytes, accuracy per task, accept lengths per drafter, task and block size."""
    drafters = {kind: _model_figures(drafter_path(name, kind), "accept_lengths") for kind in drafter_kinds(name)}
    return {"name": name, "target": _model_figures(target_path(name), "accuracy"), "drafters": drafters}


def _model_figures(folder: Path, measured: str) -> dict[str, Any]:
    weights, provenance = folder / "model.safetensors", folder / "provenance.json"
    return {
        "path": str(folder),
        "bytes": weights.stat().st_size if weights.exists() else 0,
        measured: json.loads(provenance.read_text()).get(measured, {}) if provenance.exists() else {},
    }


def table_lines(figures: list[dict[str, Any]]) -> Iterator[str]:
    """Two tables of at most 80 columns. Names come first in a line, so that a narrower terminal cuts no name."""
    yield "Targets: held-out prompts answered right (greedy, fp32)"
    yield _line("target", "", "MB", TASKS)
    for pair in figures:
        right = [pair["target"]["accuracy"].get(task, {}).get("correct") for task in TASKS]
        yield _line(pair["name"], "", _megabytes(pair["target"]), ["-" if r is None else f"{r:.0%}" for r in right])
    yield ""
    yield "Drafters: accept length at block 4/8/16 (greedy, fp32, reference decoder)"
    yield _line("target", "drafter", "MB", TASKS)
    for pair in figures:
        for kind, drafter in pair["drafters"].items():
            lengths = [drafter["accept_lengths"].get(task, {}).get("accept_length", {}) for task in TASKS]
            cells = ["/".join(f"{length:.1f}" for length in row.values()) or "-" for row in lengths]
            yield _line(pair["name"], kind, _megabytes(drafter), cells)
    yield ""
    yield "The folder of a target, or of its drafter, for a server's flags:"
    yield f"sglang-dflash pairs path {figures[0]['name']} [--drafter {next(iter(figures[0]['drafters']))}]"


def _line(target: str, drafter: str, megabytes: str, cells: Iterable[str]) -> str:
    return f"{target:12}{drafter:12}{megabytes:>3}" + "".join(f"{cell:>13}" for cell in cells)


def _megabytes(model: dict[str, Any]) -> str:
    return f"{model['bytes'] / 1e6:.1f}"
