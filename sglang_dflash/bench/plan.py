"""In which order the runs are made, so that a drifting machine does not favour an arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_dflash.bench.records import RunKey


def interleaved(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """Arms of a cell directly after each other: for servers that are all up at the same time.

    The order of the arms is turned around in every second repeat (A B, B A, …), so a linear drift cancels.
    """
    for repeat in range(repeats):
        order = _turned(modes, repeat)
        for concurrency in concurrencies:
            for task in tasks:
                for mode in order:
                    yield RunKey(mode, task, concurrency, repeat)


def one_server_at_a_time(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """All cells of an arm, then the next arm: for servers that need the whole machine.

    The arm that ends a repeat begins the next one, so it is started once for both.
    """
    for repeat in range(repeats):
        for mode in _turned(modes, repeat):
            for concurrency in concurrencies:
                for task in tasks:
                    yield RunKey(mode, task, concurrency, repeat)


def _turned(modes: Sequence[str], repeat: int) -> list[str]:
    return list(modes) if repeat % 2 == 0 else list(reversed(modes))
