"""The verdict: each promise, whether it held, and the figures that show it, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from sglang_dflash_lab.bench.provenance import describe_hardware, hardware
from sglang_dflash_lab.tables import Table
from tests.soak.catalogue import Entry
from tests.soak.load import Load, Outcome

SETTLED = 0.25  # share of the run after which memory should be level
MOST_GROWTH = 0.01  # of the memory, from the first third of the rest to the last
MOST_SLOWER = 0.10
PRESSURE = 0.6


class Promise(NamedTuple):
    what: str
    held: bool
    found: str


def promises(
    load: Load, entries: Sequence[Entry], expected: Sequence[Any], pools: Mapping[str, int], retractions: int
) -> Iterator[Promise]:
    wrong = wrong_answers(load, expected)
    compared = sum(1 for outcome in load.outcomes if outcome.complete)
    by_kind = Counter(entries[outcome.entry].kind for outcome in wrong)
    yield Promise(
        "every answer is the reference's, every part of one its beginning", not wrong, _counted(compared, by_kind)
    )
    errors = [outcome.error for outcome in load.outcomes if outcome.error]
    yield Promise("no request fails", not errors, f"{len(errors)} of {len(load.outcomes)} {errors[:1] or ''}".strip())
    yield Promise("nothing is lost", not any(pools.values()), ", ".join(f"{name} {n}" for name, n in pools.items()))
    unhealthy = sum(sample.health != 200 for sample in load.samples)
    yield Promise("/health is 200 all along", not unhealthy, f"{unhealthy} of {len(load.samples)} samples")
    yield Promise("weights load again under load", all(load.updates), f"{sum(load.updates)} of {len(load.updates)}")
    settled = [sample.rss for sample in load.samples[int(SETTLED * len(load.samples)) :]]
    third = len(settled) // 3 + 1
    early, late = median(settled[:third]), median(settled[-third:])
    yield Promise("memory is level", late < (1 + MOST_GROWTH) * early, f"{early:.0f} MiB, then {late:.0f}")
    first, last = median(load.speeds[:4]), median(load.speeds[-4:])
    speeds = f"{first:.0f} tok/s at first, {last:.0f} at last; range {min(load.speeds):.0f} to {max(load.speeds):.0f}"
    yield Promise("it ends as fast as it began", last > (1 - MOST_SLOWER) * first, speeds)
    pressed = sum(sample.kv_usage > PRESSURE for sample in load.samples) / len(load.samples)
    pressure = f"{retractions} retractions; K/V above {PRESSURE:.0%} in {pressed:.0%} of samples"
    yield Promise("the server was short of K/V", retractions > 0 and pressed > 0, pressure)


def wrong_answers(load: Load, expected: Sequence[Any]) -> list[Outcome]:
    return [outcome for outcome in load.outcomes if not is_right(outcome, expected[outcome.entry])]


def is_right(outcome: Outcome, expected: Any) -> bool:
    if outcome.complete:
        return bool(outcome.answer == expected)
    return outcome.answer is None or outcome.answer == expected[: len(outcome.answer)]


def _counted(compared: int, wrong: Counter[str]) -> str:
    return f"{compared} compared, {wrong.total()} wrong {dict(wrong) or ''}".strip()


def text(command: str, load: Load, entries: Sequence[Entry], promises: Sequence[Promise]) -> str:
    fates = Counter(outcome.fate for outcome in load.outcomes)
    kinds = Counter(entries[outcome.entry].kind for outcome in load.outcomes)
    rows = [[promise.what, "yes" if promise.held else "**no**", promise.found] for promise in promises]
    lines = [
        f"`{command}`, {describe_hardware(hardware())}: {len(load.outcomes)} requests in {load.seconds / 60:.0f} min.",
        "",
        Table("", "", ["promise", "held", "found"], rows).markdown(),
        "",
        f"Asked: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}. "
        f"Fates: {', '.join(f'{fate} {count}' for fate, count in sorted(fates.items()))}.",
        "",
    ]
    return "\n".join(lines)
