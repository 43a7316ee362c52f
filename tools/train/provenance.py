"""Where a trained model comes from, written beside its weights."""

from __future__ import annotations

import json
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dflash.bench.provenance import collect, describe_hardware
from tools.train.loop import LogEntry

FILE = "provenance.json"


def write_provenance(folder: Path, seed: int, log: list[LogEntry], validation: str, recipe: dict[str, Any]) -> None:
    """Write ``provenance.json`` and ``loss.png`` to ``folder``.

    Args:
        validation: what the log's validation figure is, in words.
        recipe: the training's parameters.
    """
    run = collect(recipe)
    content = {
        "command": run["command"],
        "commit": run["commit"],
        "date": run["time"],
        "machine": describe_hardware(run["hardware"]),
        "versions": run["versions"] | {"tokenizers": version("tokenizers")},
        "seed": seed,
        "recipe": recipe,
        "minutes": round(log[-1].minutes, 1),
        "validation_is": validation,
        "log": [asdict(entry) for entry in log[:: max(1, len(log) // 20)]] + [asdict(log[-1])],
    }
    _write(folder, content)
    _plot(folder / "loss.png", log, validation)


def add_measurement(folder: Path, key: str, table: dict[str, Any]) -> None:
    """Add a table of ``measure`` to the folder's ``provenance.json``, with the command that made it."""
    content = read_provenance(folder) | {key: table, f"{key}_command": collect({})["command"]}
    _write(folder, content)


def read_provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def _write(folder: Path, content: dict[str, Any]) -> None:
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def _plot(file: Path, log: list[LogEntry], validation: str) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, left = pyplot.subplots(figsize=(5, 3))
    steps = [entry.step for entry in log]
    left.semilogy(steps, [entry.loss for entry in log], label="training loss")
    left.set_xlabel("step")
    left.set_ylabel("loss")
    right = left.twinx()
    right.plot(steps, [entry.validation for entry in log], color="tab:orange", label=validation)
    right.set_ylabel(validation)
    figure.legend(loc="upper center", fontsize="small")
    figure.savefig(file, dpi=70, bbox_inches="tight")
    pyplot.close(figure)
