"""The order in which the runs are made, so that a drifting machine favours no arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from sglang_dflash.bench.records import RunKey


def interleaved(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """Arms of a cell directly after each other: for servers that are all up at the same time.

    The order of the arms is turned around in every second repeat (A B, B A, …), so a linear drift cancels.
    """
    for repeat in range(repeats):
        for concurrency, task, mode in product(concurrencies, tasks, _turned(modes, repeat)):
            yield RunKey(mode, task, concurrency, repeat)


def one_server_at_a_time(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """All cells of an arm, then the next arm: for servers that need the whole machine.

    The arm that ends a repeat begins the next one, so it is started once for both.
    """
    for repeat in range(repeats):
        for mode, concurrency, task in product(_turned(modes, repeat), concurrencies, tasks):
            yield RunKey(mode, task, concurrency, repeat)


def _turned(modes: Sequence[str], repeat: int) -> Sequence[str]:
    return modes[::-1] if repeat % 2 else modes
