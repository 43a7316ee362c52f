"""The equality matrix: its cells, and a record of those that passed, so that an interrupted run goes on.

``make test-matrix`` runs the cells that are not recorded, then this module, which counts what all of them compared. A
changed package, another SGLang, or other stored accept lengths start over. ``EXACT=1`` runs the cells in exact mode:
bfloat16 under deterministic inference, without those that the plan does not call exact.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
import os
import sys
from argparse import ArgumentParser
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import sglang_dflash
from sglang_dflash.check.flags import parse
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.exact import reasons_against_exact
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.settings import DETERMINISTIC_FLAG
from sglang_dflash_lab.pairs import NAMES, drafter_kinds, drafter_path, target_path
from tests.support.acceptance import FIGURES
from tests.support.servers import BFLOAT16, DENSE, RANDOM_WIDTHS

EXACT = (*BFLOAT16, DETERMINISTIC_FLAG)
IN_EXACT_MODE = bool(os.environ.get("EXACT"))


@dataclass(frozen=True)
class Cell:
    """A way to serve a pair under DFLASH."""

    pair: str
    drafter: str = "good"
    block: int = 16
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        environment = (f"{key}={value}" for key, value in self.environment)
        arguments = (Path(argument).name for argument in self.arguments)
        return " ".join((self.pair, self.drafter, str(self.block), *arguments, *environment))

    def drafts_every_step(self, concurrency: int) -> bool:
        """Whether all steps of a request verify a full block: its own scheduling does not move its accept length."""
        if RANDOM_WIDTHS[0] in self.arguments:
            return False
        return concurrency == 1 or not (RETRACTED[0] in self.environment or MIXED in self.arguments)

    def inexact(self) -> tuple[str, ...]:
        """The plan's reasons why a verify of this cell is not exact."""
        served = (*EXACT, *self.arguments)
        pair = {"target": str(target_path(self.pair)), "drafter": str(drafter_path(self.pair, self.drafter))}
        settings, _ = parse(served, **pair)
        return tuple(reasons_against_exact(Launch.of(settings, CPU)))


MIXED = "--enable-mixed-chunk"
STRATEGY = "--mamba-radix-cache-strategy"
SYNC = ("--disable-overlap-schedule",)
PAGED = ("--page-size", "16")
CHUNKED = ("--chunked-prefill-size", "64")
RETRACTED = (("SGLANG_TEST_RETRACT", "1"),)

# Every drafter at every block size; overlap, page size, chunks and retraction in turn, each with each of the others.
TURNS_IN_ALL = 9
TURNS = itertools.cycle(
    [
        ((), ()),
        ((*SYNC, *CHUNKED), ()),
        (PAGED, RETRACTED),
        ((*SYNC, STRATEGY, "no_buffer"), ()),
        ((*PAGED, *CHUNKED), ()),
        ((), RETRACTED),
        ((*SYNC, *PAGED), ()),
        ((STRATEGY, "extra_buffer_lazy"), ()),
        ((*CHUNKED, MIXED), ()),
    ]
)


def next_turn(pair: str, drafter: str, block: int) -> Cell:
    arguments, environment = next(TURNS)
    if pair in DENSE and STRATEGY in arguments:  # refused where there are no recurrent states
        at = arguments.index(STRATEGY)
        arguments = (*arguments[:at], *arguments[at + 2 :])
    return Cell(pair, drafter, block, arguments, environment)


FIXED = tuple(
    next_turn(pair, drafter, block) for pair in NAMES for drafter in drafter_kinds(pair) for block in (16, 2, 8, 4)
)

# Another width at every step and requests cut at random inside a batch, in each of the turns; the draft window with it.
WINDOW = ("--speculative-draft-window-size", "24")
RANDOM = tuple(
    Cell(pair, drafter, 16, (*cell.arguments, *RANDOM_WIDTHS, *window), cell.environment)
    for pair, drafter, window, turns in (
        ("tiny-hybrid", "noisy", (), TURNS_IN_ALL),
        ("tiny-hybrid", "good", WINDOW, TURNS_IN_ALL),
        ("tiny-hybrid", "dflash2", WINDOW, 5),
        ("tiny-moe", "noisy", (), 5),
        ("tiny-dense", "noisy", WINDOW, 3),
    )
    for cell in (next_turn(pair, drafter, 16) for _ in range(turns))
)

# A selector's candidates and its walk on two ranks: each rank sees a half of the vocabulary.
RANKS = (Cell("tiny-hybrid", "dflash2", 8, ("--tp-size", "2")),)

# Flags of the command lines that most users of a DFlash2 drafter run. Without chunks SGLang reserves 24 GB for
# activations by default. Its shape, bidirectional and sliding: tests/drafter/test_drafter_shapes.py.
NO_CACHE, ONE = "--disable-radix-cache", ("--max-running-requests", "1")
COMMANDS = tuple(
    Cell("tiny-hybrid", "dflash2", 8, flags)
    for flags in (
        (STRATEGY, "extra_buffer", *ONE),
        ("--disable-cuda-graph", NO_CACHE, "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5"),
    )
)

MATRIX = (*FIXED, *RANDOM, *RANKS, *COMMANDS)


class Record:
    """Finished cells by name, each with a result, in a file of JSON lines that several processes may append to.

    Args:
        folders: whose files a result depends on, from the repository's root; default: the package.
    """

    def __init__(self, file: Path, *folders: str) -> None:
        self._file, self._folders = file, folders or ("sglang_dflash",)

    @cached_property
    def key(self) -> str:
        """What a result holds for: the folders' files, versions, and the stored accept lengths."""
        versions = " ".join(map(importlib.metadata.version, ("sglang", "torch", "triton")))
        digest = hashlib.sha256(versions.encode() + FIGURES.read_bytes())
        root = Path(sglang_dflash.__file__).parents[1]
        for path in sorted(path for folder in self._folders for path in (root / folder).rglob("*")):
            if path.is_file() and path.suffix != ".pyc":
                digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
        return digest.hexdigest()[:16]

    def results(self) -> dict[str, Any]:
        """The result of every cell that this very package has passed."""
        lines = self._file.read_text().splitlines() if self._file.exists() else []
        return {line["cell"]: line["result"] for line in map(json.loads, lines) if line["key"] == self.key}

    def add(self, cell: str, result: Any) -> None:
        self._file.parent.mkdir(exist_ok=True)
        with self._file.open("a") as file:
            file.write(json.dumps({"key": self.key, "cell": cell, "result": result}) + "\n")


def finished(*, exact: bool = False) -> Record:
    return Record(Path(__file__).parents[2] / ".cache" / ("matrix-exact.jsonl" if exact else "matrix.jsonl"))


def main() -> None:
    ArgumentParser(description=__doc__).parse_args()
    record = finished(exact=IN_EXACT_MODE)
    results = record.results()
    cells = [cell for cell in MATRIX if not (IN_EXACT_MODE and cell.inexact())]
    compared = [results[str(cell)] for cell in cells if str(cell) in results]
    print(f"{sum(compared)} generations compared in {len(compared)} of {len(cells)} cells, package {record.key}")
    sys.exit(len(compared) < len(cells))


if __name__ == "__main__":
    main()
