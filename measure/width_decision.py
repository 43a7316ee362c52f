"""What a step's width decision takes of the host: ``python -m measure.width_decision``.

One step is ``width``, ``observe`` and ``observe_time`` together, in time of this process alone.
"""

from __future__ import annotations

from random import Random
from time import process_time
from timeit import repeat
from typing import Annotated

import typer

from sglang_dflash.width import AdaptiveWidth, CostTable, default_widths

STEPS, REPEATS = 5000, 5
_BATCH_SIZES = (1, 4, 8, 16, 32, 64)


def microseconds(batch_size: int, block_size: int, matching: float = 0.0) -> float:
    """Of one step, the least of several repeats, each a mean over ``STEPS`` steps.

    Args:
        matching: share of the batch's rows that have something to copy.
    """
    widths, random = default_widths(block_size), Random(0)
    points = {(size, width): 5 + 0.1 * size * width for size in _BATCH_SIZES for width in widths}
    policy = AdaptiveWidth(CostTable(points))
    accepted = {
        width: [[min(width, 1 + int(random.expovariate(0.2))) for _ in range(batch_size)] for _ in range(64)]
        for width in widths
    }
    matched = [row < matching * batch_size for row in range(batch_size)] if matching else ()
    turn = iter(range(STEPS * REPEATS))

    def step() -> None:
        width = policy.width(batch_size, 20_000, matching)
        policy.observe(width, accepted[width][next(turn) % 64], matched)
        policy.observe_time(batch_size, width, 20_000, 5 + 0.1 * batch_size * width)

    return min(repeat(step, timer=process_time, number=STEPS, repeat=REPEATS)) / STEPS * 1e6


def main(block_size: Annotated[int, typer.Option(help="Widest block, anchor included.")] = 16) -> None:
    """Print microseconds of a step by batch size."""
    for batch_size in _BATCH_SIZES:
        alone, mixed = (microseconds(batch_size, block_size, matching) for matching in (0.0, 0.5))
        print(f"batch {batch_size:2}: {alone:5.1f} microseconds a step, {mixed:5.1f} if half of the rows match")


if __name__ == "__main__":
    typer.run(main)
