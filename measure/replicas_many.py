"""Seconds a request, by policy, replicas and share of what they can do, from one replica's rates.

``python -m measure.replicas_many --card Qwen3.5-27B --task math500``: from the throughputs that a card publishes, with
the best block at each concurrency, as an adaptive width would choose it. `replicas` prints the same from its own rates.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random
from typing import Annotated

import typer

from measure.replicas_model import Load, Rates, simulate, split_at_random
from sglang_dflash.bench.settings import published_pairs
from sglang_dflash.bench.tables import Table
from sglang_dflash.errors import DFlashError
from sglang_dflash.user_errors import user_errors

RANDOM, TWO_CHOICES, LEAST_LOADED = "random", "two choices", "least-loaded"
MANY = (1, 2, 8, 1000)
SHARES = (0.5, 0.8, 0.9, 0.95)
# Requests of a simulation that stands for an endless one: at least so many, and so many for each slot.
_REQUESTS, _OF_A_SLOT, _WARM_UP = 40_000, 8, 0.25


def choices(policy: str, replicas: int) -> int:
    """How many replicas the router compares."""
    return min({RANDOM: 1, TWO_CHOICES: 2, LEAST_LOADED: replicas}[policy], replicas)


def predict(rates: Rates, arrivals: float, replicas: int, policy: str) -> Load:
    """The steady state; ``arrivals`` per second at all replicas."""
    if choices(policy, replicas) == 1 or arrivals >= replicas * rates.most:
        return split_at_random(rates, arrivals / replicas)
    seconds = max(_REQUESTS, _OF_A_SLOT * rates.slots * replicas) / arrivals
    begin = next(n for n in range(rates.slots + 1) if rates(n) >= arrivals / replicas)
    return simulate(rates, arrivals, replicas, choices(policy, replicas), seconds, Random(0), _WARM_UP * seconds, begin)


def table(rates: Rates, shares: Iterable[float] = SHARES, many: Iterable[int] = MANY) -> Iterator[str]:
    """Seconds a request, and in brackets those of them without a slot."""
    lines, numbers = [], list(many)
    for share in shares:
        for policy in (RANDOM, TWO_CHOICES, LEAST_LOADED):
            loads = [predict(rates, share * rates.most * n, n, policy) for n in numbers]
            cells = [f"{load.seconds:.2f} ({load.waiting_seconds:.2f})" for load in loads]
            lines.append([f"{share}", policy, *cells])
    yield Table("", "", ["share", "policy", *map(str, numbers)], lines).markdown()


def card_rates(name: str, task: str, tokens: float) -> Rates:
    """Requests of ``tokens`` tokens per second, by concurrency, of the card's replica.

    Raises:
        DFlashError: the card has no throughputs for the task.
    """
    best: dict[int, float] = {}
    for row in published_pairs().get(name, {}).get("speed", ()):
        if row["task"] == task and row["arm"] == "dflash":
            best[row["concurrency"]] = max(best.get(row["concurrency"], 0.0), row["tokens_per_s"] / tokens)
    if not best:
        raise DFlashError(
            f"--card {name} --task {task}",
            expected="a card and a task with published throughputs",
            remedy="see sglang_dflash/bench/published.json",
        )
    return Rates(best, slots=max(best))


def main(
    card: Annotated[str, typer.Option(help="Its target: Qwen3.5-27B, …")],
    task: str = "math500",
    tokens: Annotated[float, typer.Option(help="Of an answer, mean.")] = 2000.0,
) -> None:
    """Print the table of a card."""
    with user_errors():
        rates = card_rates(card, task, tokens)
        typer.echo(f"{rates.most:.3f} requests/s of a full replica, {1 / rates(1):.2f} s of a request alone")
        typer.echo("\n".join(table(rates)))


if __name__ == "__main__":
    typer.run(main)
