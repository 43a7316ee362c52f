"""What `replicas` measured beside what one replica's rates predict, and what they say of more replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from statistics import mean, quantiles
from typing import Any

from measure.replicas_many import choices, predict, table
from measure.replicas_model import Rates, simulate
from sglang_dflash.bench.tables import Table

RUNS = 100  # simulated, of one cell
Row = Mapping[str, Any]


def report(rates: Sequence[Row], cells: Sequence[Row]) -> Iterator[str]:
    """Three tables: the rates, predicted beside measured, and more replicas.

    Args:
        rates: rows with ``users``, ``rate`` and its standard ``error``; ``plan`` is the measurement's.
        cells: rows as `replicas.measure_cell` makes them.
    """
    columns = ["in flight", "requests/s", "standard error"]
    lines = [[str(row["users"]), f"{row['rate']:.2f}", f"{row['error']:.2f}"] for row in rates]
    yield Table("", "", columns, lines).markdown()
    yield ""
    yield from compared(rates, cells)
    yield ""
    yield from table(rates_of(rates))


def rates_of(rows: Sequence[Row], rng: Random | None = None) -> Rates:
    """The measured rates; with ``rng``, as another measurement could have found them."""
    measured = {row["users"]: rng.gauss(row["rate"], row["error"]) if rng else row["rate"] for row in rows}
    return Rates(measured, rows[0]["plan"]["slots"])


def compared(rates: Sequence[Row], cells: Sequence[Row]) -> Iterator[str]:
    columns = [
        *("policy", "replicas", "share", "arrivals/s", "answered/s", "s predicted [90 % of runs]", "s measured"),
        *("off by", "in flight predicted", "measured", "s without a slot predicted", "measured"),
    ]
    lines, errors, inside = [], [], 0
    for cell in cells:
        load = predict(rates_of(rates), cell["arrivals"], cell["replicas"], cell["policy"])
        low, high = run_to_run(rates, cell)
        error = cell["latency"] / load.seconds - 1
        errors.append(abs(error))
        inside += low <= cell["latency"] <= high
        lines.append([
            *(cell["policy"], str(cell["replicas"]), f"{cell['share']}"),
            *(f"{cell['arrivals']:.2f}", f"{cell['completed']:.2f}"),
            *(f"{load.seconds:.2f} [{low:.2f}, {high:.2f}]", f"{cell['latency']:.2f} ± {cell['error']:.2f}"),
            *(f"{100 * error:+.0f} %", f"{cell['replicas'] * load.requests:.1f}", f"{cell['in_flight']:.1f}"),
            *(f"{load.waiting_seconds:.2f}", f"{cell['queue']:.2f}"),
        ])  # fmt: skip
    yield Table("", "", columns, lines).markdown()
    if errors:
        yield ""
        yield (
            f"off by {100 * mean(errors):.0f} % in the mean, {100 * max(errors):.0f} % at most; "
            f"{inside} of {len(errors)} within 90 % of the model's runs"
        )


def run_to_run(rates: Sequence[Row], cell: Row) -> tuple[float, float]:
    """90 % of the mean latencies that runs as long as the measured one would have, by the model."""
    rng, plan, found = Random(0), cell["plan"], []
    for _ in range(RUNS):
        drawn, routed = rates_of(rates, rng), choices(cell["policy"], cell["replicas"])
        load = simulate(drawn, cell["arrivals"], cell["replicas"], routed, plan["seconds"], rng, plan["warm_up"])
        found.append(load.seconds)
    cuts = quantiles(found, n=20)
    return cuts[0], cuts[-1]
