"""The verdict: each promise, whether it held, and the figures that show it, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any, NamedTuple

from sglang_dflash_lab.bench.provenance import collect, describe_hardware
from sglang_dflash_lab.tables import Table
from tests.soak.catalogue import HOSTILE, Entry
from tests.soak.events import DISTURBING
from tests.soak.load import Happened, Load, Outcome
from tests.soak.rows import Row

SETTLED = 0.25  # share of the run after which memory should be level
MOST_GROWTH = 0.01  # of the memory, from the first third of the rest to the last
MOST_SLOWER = 0.10
PRESSURE = 0.6
GRACE = 1.0  # seconds between an event's end and a client that notices it

Known = Sequence[Sequence[Any]]  # the answers of each version of the target, by entry


class Promise(NamedTuple):
    what: str
    held: bool
    found: str


class Rest(NamedTuple):
    """Of the servers at rest: lost slots by name, and what the row wanted to happen, how often."""

    lost: Counter[str]
    happened: dict[str, int]


def promises(row: Row, load: Load, entries: Sequence[Entry], wrong: Sequence[Outcome], rest: Rest) -> Iterator[Promise]:
    compared = sum(outcome.complete for outcome in load.outcomes)
    by_kind = Counter(entries[outcome.entry].kind for outcome in wrong)
    counted = f"{compared} compared, {len(wrong)} wrong {dict(by_kind) or ''}".strip()
    yield Promise("every answer is the reference's, every part of one its beginning", not wrong, counted)
    failed = [outcome for outcome in load.outcomes if outcome.error]
    errors = [each.error for each in failed if "Timeout" in str(each.error) or not during(load, each.began, each.ended)]
    excused = f"{len(failed) - len(errors)} while servers died or aborted" if len(failed) > len(errors) else ""
    shown = f"{len(errors)} of {len(load.outcomes)} {errors[:1] or ''} {excused}"
    yield Promise("no request fails or hangs", not errors, " ".join(shown.split()))
    lost = ", ".join(f"{name} {n}" for name, n in rest.lost.items())
    yield Promise("nothing is lost", not any(rest.lost.values()), lost)
    watched = [each for each in load.samples if not during(load, each.at, each.at)]
    unhealthy = sum(sample.health != 200 for sample in watched)
    yield Promise("/health is 200 all along", not unhealthy, f"{unhealthy} of {len(watched)} samples")
    happened = Counter(each.name for each in load.events)
    missing = [each.__name__ for each in row.events if each.__name__ not in happened]
    shown = ", ".join(f"{name} {times}" for name, times in happened.items()) or "none"
    yield Promise("every event happened", not missing, shown)
    for what, times in rest.happened.items():
        yield Promise(f"there was {what}", times > 0, str(times))
    if load.among:
        alone, among = median(load.speeds), median(load.among)
        held = among > (1 - MOST_SLOWER) * alone / 2
        speeds = f"{alone:.0f} tok/s alone, {among:.0f} among as many hostile ones"
        yield Promise("good requests keep half of the speed", held, speeds)
    if row.long:
        yield from _long(load)


def _long(load: Load) -> Iterator[Promise]:
    samples = [each for each in load.samples if each.start == load.samples[-1].start]
    settled = [sample.rss for sample in samples[int(SETTLED * len(samples)) :]]
    third = len(settled) // 3 + 1
    early, late = median(settled[:third]), median(settled[-third:])
    yield Promise("memory is level", late < (1 + MOST_GROWTH) * early, f"{early:.0f} MiB, then {late:.0f}")
    first, last = median(load.speeds[:4]), median(load.speeds[-4:])
    speeds = f"{first:.0f} tok/s at first, {last:.0f} at last; range {min(load.speeds):.0f} to {max(load.speeds):.0f}"
    yield Promise("it ends as fast as it began", last > (1 - MOST_SLOWER) * first, speeds)
    pressed = sum(sample.kv_usage > PRESSURE for sample in load.samples) / len(load.samples)
    yield Promise("K/V was short", pressed > 0, f"above {PRESSURE:.0%} in {pressed:.0%} of samples")


def during(load: Load, began: float, ended: float) -> bool:
    """Whether a request ran while an event that may end it happened."""
    return any(each.began < ended and began < each.ended + GRACE for each in load.events if each.name in DISTURBING)


def versions_of(outcome: Outcome, events: Sequence[Happened]) -> list[int]:
    """Return the versions of the weights that were served while a request ran, in order."""
    before = [each.version for each in events if each.ended <= outcome.began]
    meanwhile = [each.version for each in events if each.began < outcome.ended and outcome.began < each.ended]
    return list(dict.fromkeys([*(before or [0])[-1:], *meanwhile]))


def wrong_answers(load: Load, entries: Sequence[Entry], known: Known) -> list[Outcome]:
    def right(outcome: Outcome) -> bool:
        served = versions_of(outcome, load.events)
        return any(is_right(outcome, known[version][outcome.entry]) for version in served)

    return [each for each in load.outcomes if entries[each.entry].kind != HOSTILE and not right(each)]


def is_right(outcome: Outcome, expected: Any) -> bool:
    if outcome.complete:
        return bool(outcome.answer == expected)
    return outcome.answer is None or outcome.answer == expected[: len(outcome.answer)]


def text(row: Row, share: float, load: Load, entries: Sequence[Entry], promises: Sequence[Promise]) -> str:
    fates = Counter(outcome.fate for outcome in load.outcomes)
    kinds = Counter(entries[outcome.entry].kind for outcome in load.outcomes)
    rows = [[promise.what, "yes" if promise.held else "**no**", promise.found] for promise in promises]
    source = collect({})
    command = f"make soak ROW='{row.name}'" + (f" SHARE={share:g}" if share != 1 else "")
    lines = [
        f"## {row.name}",
        "",
        f"`{command}`, commit {source['commit']}, {describe_hardware(source['hardware'])}: "
        f"{len(load.outcomes)} requests, a share of {share:g}, in {load.seconds / 60:.0f} min.",
        "",
        Table("", "", ["promise", "held", "found"], rows).markdown(),
        "",
        f"Asked: {', '.join(f'{kind} {count}' for kind, count in sorted(kinds.items()))}. "
        f"Fates: {', '.join(f'{fate} {count}' for fate, count in sorted(fates.items()))}.",
        "",
    ]
    return "\n".join(lines)
