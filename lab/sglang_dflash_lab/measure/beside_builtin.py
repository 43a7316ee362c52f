"""Our worker compared with SGLang's own: ``python -m sglang_dflash_lab.measure.beside_builtin FOLDER``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from sglang_dflash.diagnose.tables import Table
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.bench.summary import Summary

OURS, BUILTIN = "dflash", "builtin"
COLUMNS = ["pair", "c", "block", "builtin", "ours", "ours over builtin"]


def rows(folder: Path) -> Iterator[list[str]]:
    """One row per concurrency and block of a results folder, named after the folder.

    The ratio is taken within each repeat, in which both arms run one after the other: its median, and its range.
    """
    summary = Summary(results.read_finished(folder))
    for task in summary.tasks:
        for concurrency in summary.concurrencies:
            for block in (mode.partition(":")[2] for mode in summary.modes if mode.startswith(f"{OURS}:")):
                ours, builtin = (summary.throughput(f"{arm}:{block}", task, concurrency) for arm in (OURS, BUILTIN))
                ratios = [ours[repeat] / builtin[repeat] for repeat in sorted(ours.keys() & builtin.keys())]
                speeds = [f"{median(arm.values()):.0f}" for arm in (builtin, ours)]
                ratio = f"{median(ratios):.2f}x [{min(ratios):.2f}, {max(ratios):.2f}]"
                yield [folder.name, str(concurrency), block, *speeds, ratio]


def main(folders: Annotated[list[Path], typer.Argument(help="Results with the arms dflash:B and builtin:B.")]) -> None:
    """Print output tok/s of both workers, median over repeats, and how far ours is ahead."""
    typer.echo(describe_hardware(hardware()))
    typer.echo(
        Table("Beside the builtin worker", "", COLUMNS, [r for folder in folders for r in rows(folder)]).markdown()
    )


if __name__ == "__main__":
    typer.run(main)
