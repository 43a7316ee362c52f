"""Every long run of the project, one at a time: ``make proof``.

A run that has passed is not repeated while the files that it depends on stay the same. The table of all runs, with the
commit of each, is printed and written to ``.cache/proof.md``; the logs are in ``.cache/proof``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tabulate import tabulate

from tests.kits.__main__ import ROWS as KITS
from tests.serving.matrix import Record
from tests.soak.rows import ROWS as SOAK

CACHE = Path(__file__).parents[1] / ".cache"
SERVED = ("sglang_dflash", "cpu_platform", "lab/sglang_dflash_lab", "tests/support", "tests/plugin")
SHARE = 0.2


@dataclass(frozen=True)
class Run:
    """A command of this repository.

    Attributes:
        folders: from the repository's root; a change of a file below them makes the result old.
    """

    name: str
    command: str
    folders: tuple[str, ...] = (*SERVED, "tests")

    @property
    def record(self) -> Record:
        return Record(CACHE / "proof.jsonl", *self.folders)

    @property
    def result(self) -> dict[str, Any] | None:
        """What :func:`finish` wrote for these files, or None."""
        found: dict[str, Any] | None = self.record.results().get(self.name)
        return found


def runs() -> Iterator[Run]:
    for name in ("test", "test-engine", "demo"):
        yield Run(name, f"make {name}")
    yield Run("demo, full", "make demo FULL=1", SERVED)
    yield Run("wheels", "make dist")
    for target in ("test-slow", "test-pd", "test-tools", "rehearse"):
        yield Run(target, f"make {target}")
    yield Run("matrix", "make test-matrix", (*SERVED, "tests/serving"))
    yield Run("matrix, exact", "make test-matrix EXACT=1", (*SERVED, "tests/serving"))
    yield Run("mutants", "make mutants")
    for row in SOAK:
        yield Run(f"soak: {row.name}", f"make soak ROW='{row.name}' SHARE={SHARE}", (*SERVED, "tests/soak"))
    for name in KITS:
        yield Run(f"SGLang's tests: {name}", f"make test-sglang ROWS={name}", (*SERVED, "tests/kits"))
    yield Run("fuzz", "make fuzz", (*SERVED, "tests/fuzz"))
    yield Run("test-kit", "make test-kit", (*SERVED, "tools", "tests/kit", "tests/rehearsal"))
    yield Run("test-real", "make test-real", (*SERVED, "tests/real"))


def finish(run: Run) -> dict[str, Any]:
    """Run the command, keep its result, and return it."""
    folder = CACHE / "proof"
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / f"{run.name.replace('/', '-')}.log", time.monotonic()
    commit = subprocess.check_output(["git", "describe", "--always", "--dirty"], text=True).strip()
    with log.open("w") as file:
        code = subprocess.run(run.command, shell=True, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
    lines = [line.strip(" =") for line in log.read_text(errors="replace").splitlines() if line.strip(" =")]
    result = {"code": code, "commit": commit, "minutes": round((time.monotonic() - began) / 60, 1)}
    result["last"] = lines[-1][:120] if lines else ""
    run.record.add(run.name, result)
    return result


def table(chosen: Sequence[Run]) -> str:
    rows = [
        (run.name, f"`{run.command}`", *((found["commit"], found["minutes"], found["last"]) if found else ("not run",)))
        for run in chosen
        for found in [run.result]
    ]
    return tabulate(rows, ["run", "command", "commit", "minutes", "last line"], "github", missingval="")


def main(
    names: Annotated[list[str] | None, typer.Argument(help="Beginnings of names of runs; all without one.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the table and run nothing.")] = False,
) -> None:
    """Run what has not passed with these files, one at a time. Exit status 1 if a run failed."""
    chosen = [run for run in runs() if not names or run.name.startswith(tuple(names))]
    for run in chosen:
        if not show and (run.result is None or run.result["code"]):
            print(f"{time.strftime('%H:%M')} {run.name}: {run.command}", flush=True)
            result = finish(run)
            print(f"{time.strftime('%H:%M')} {run.name}: exit status {result['code']}, {result['last']}", flush=True)
    text = table(chosen)
    (CACHE / "proof.md").write_text(f"{text}\n")
    print(text)
    sys.exit(any(run.result is None or run.result["code"] for run in chosen))


if __name__ == "__main__":
    typer.run(main)
