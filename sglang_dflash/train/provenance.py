"""Where a trained model comes from, written beside its weights."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from sglang_dflash.train.loop import LogEntry

FILE = "provenance.json"


def write_provenance(folder: Path, seed: int, log: list[LogEntry], validation: str, recipe: dict[str, Any]) -> None:
    """Write `provenance.json` and `loss.png` to `folder`.

    Args:
        validation: what the log's validation figure is, in words.
        recipe: the training's parameters.
    """
    content = {
        "command": " ".join(["sglang-dflash", *sys.argv[1:]]),
        "commit": _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": f"{platform.machine()}, {_processor()}",
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "seed": seed,
        "recipe": recipe,
        "minutes": round(log[-1].minutes, 1),
        "validation_is": validation,
        "log": [asdict(entry) for entry in log[:: max(1, len(log) // 20)]] + [asdict(log[-1])],
    }
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")
    _plot(folder / "loss.png", log, validation)


def add_measurement(folder: Path, key: str, table: dict[str, Any]) -> None:
    """Add a table of `measure` to the folder's `provenance.json`, with the command that made it."""
    content = json.loads((folder / FILE).read_text())
    content[key] = table
    content[f"{key}_command"] = " ".join(["sglang-dflash", *sys.argv[1:]])
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def read_provenance(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def _commit() -> str:
    """The source tree's commit, `-dirty` where files differ from it; `unknown` outside a git checkout."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "."], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("-dirty" if changed else "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        "unknown processor",
    )


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
