"""``bench simulate``: from what is to be predicted to the table."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from sglang_dflash.bench.simulate.cards import card_table, cells, choose
from sglang_dflash.bench.simulate.cells import of_benchmark, of_log
from sglang_dflash.bench.simulate.predict import predict
from sglang_dflash.bench.simulate.recording import check_widths
from sglang_dflash.bench.simulate.table import prediction_table
from sglang_dflash.bench.tables import Table
from sglang_dflash.errors import DFlashError


def simulated(
    recording: Path | None, cards: bool, users: int | None, measured: Path | None, seed: int, console: Console
) -> Table:
    """The table of the cards, or that of a recording; what makes its predictions doubtful goes to the console.

    Raises:
        DFlashError: options that contradict each other, or a recording from which nothing can be predicted.
    """
    if cards == (recording is not None):
        raise DFlashError(
            "both a recording and --cards" if cards else "neither a recording nor --cards",
            expected="one of them",
            remedy="give the folder of a benchmark with an arm random:BLOCK, or --cards",
        )
    of_a_log = recording is not None and not recording.is_dir()
    if (users or measured) and not of_a_log:
        raise DFlashError(
            "--concurrency or --measured without a step log",
            expected="a step log: a results folder and the cards have their own",
            remedy="leave them out",
        )
    if recording is None:
        return card_table([choose(cell, seed) for cell in cells()])
    source = of_log(recording, users, measured) if of_a_log else of_benchmark(recording)
    for warning in check_widths(source.steps):
        console.print(f"warning: {warning}", style="yellow", markup=False)
    return prediction_table(predict(source, seed), source.source)
