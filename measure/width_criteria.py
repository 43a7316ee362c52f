"""What the rows of ``width_table`` say: a table of cells, and whether the adaptive width holds what it promises."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from statistics import median
from typing import Any

from measure.width_arms import ADAPTIVE, BUILTIN, PLAIN
from sglang_dflash.bench.tables import Table

CELL = ("pair", "drafter", "task", "concurrency")
OF_BEST, OF_PLAIN, OF_ONE_BLOCK, OF_BUILTIN = 0.97, 0.98, 1.10, 1.15
PAYS = 1.05  # drafting pays where some block is this much faster than plain decoding: more than noise
Cell = tuple[Any, ...]
Speeds = Mapping[str, float]  # tok/s by arm


def speeds_of_repeats(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, dict[str, list[float]]]:
    """Tokens per second by cell and arm, of each repeat."""
    runs: dict[Cell, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        runs[tuple(row[key] for key in CELL)][row["arm"]].append(row["tokens"] / row["seconds"])
    return runs


def medians(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, dict[str, float]]:
    """Tokens per second by cell and arm, the median over repeats."""
    runs = speeds_of_repeats(rows)
    return {cell: {arm: median(speeds) for arm, speeds in arms.items()} for cell, arms in runs.items()}


def noise(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """How far repeats of the same run are apart, as a share of their median, median over all; None for one repeat."""
    runs = [speeds for arms in speeds_of_repeats(rows).values() for speeds in arms.values() if len(speeds) > 1]
    return median((max(speeds) - min(speeds)) / median(speeds) for speeds in runs) if runs else None


def mean_widths(rows: Sequence[Mapping[str, Any]]) -> dict[Cell, float]:
    """Positions of the adaptive arm's blocks, mean over its steps, by cell."""
    steps: dict[Cell, Counter[int]] = defaultdict(Counter)
    for row in rows:
        if row["arm"] == ADAPTIVE:
            steps[tuple(row[key] for key in CELL)].update({int(width): n for width, n in row["steps"].items()})
    return {cell: sum(width * n for width, n in counts.items()) / counts.total() for cell, counts in steps.items()}


def over_best(speeds: Speeds) -> float:
    """The adaptive arm over the fastest other arm of ours, plain decoding included."""
    return speeds[ADAPTIVE] / max(speed for arm, speed in speeds.items() if arm == PLAIN or is_fixed(arm))


def over_builtin(speeds: Speeds) -> float | None:
    """The adaptive arm over the fastest builtin one; None where drafting does not pay."""
    builtin = [speed for arm, speed in speeds.items() if arm.startswith(BUILTIN)]
    blocks = [speed for arm, speed in speeds.items() if is_fixed(arm)]
    if not builtin or max((*blocks, *builtin)) < PAYS * speeds[PLAIN]:
        return None
    return speeds[ADAPTIVE] / max(builtin)


def over_one_block(cells: Sequence[Speeds]) -> tuple[str, float]:
    """The fixed block that is best over all cells, and the geometric mean of the adaptive arm over it."""
    fixed = [arm for arm in cells[0] if is_fixed(arm)]
    gains = {arm: geometric_mean([speeds[ADAPTIVE] / speeds[arm] for speeds in cells]) for arm in fixed}
    best = min(gains, key=gains.__getitem__)
    return best, gains[best]


def is_fixed(arm: str) -> bool:
    return arm.isdecimal()


def geometric_mean(ratios: Sequence[float]) -> float:
    return prod(ratios) ** (1 / len(ratios))


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """The table, then a line per promise; those only of cells that have all arms."""
    cells, widths = medians(rows), mean_widths(rows)
    arms = list(dict.fromkeys(arm for speeds in cells.values() for arm in speeds))
    complete = {cell: speeds for cell, speeds in cells.items() if {ADAPTIVE, PLAIN, *arms} == speeds.keys()}
    columns = [*CELL, *arms, "mean width", "over best", "over plain", "over builtin"]
    lines = [_row(cell, speeds, arms, widths.get(cell)) for cell, speeds in cells.items()]
    yield Table("Widths", "", columns, lines).markdown()
    yield ""
    if (apart := noise(rows)) is not None:
        yield f"Repeats of the same run are {apart:.1%} apart (median)."
    if complete:
        yield from verdicts(complete)
    if len(complete) < len(cells):
        yield f"{len(cells) - len(complete)} of {len(cells)} cells lack arms and are not judged."


def verdicts(cells: Mapping[Cell, Speeds]) -> Iterator[str]:
    """A line per promise, and the cells that break it."""
    builtin = {cell: ratio for cell, speeds in cells.items() if (ratio := over_builtin(speeds)) is not None}
    plain = {cell: speeds[ADAPTIVE] / speeds[PLAIN] for cell, speeds in cells.items()}
    best = {cell: over_best(speeds) for cell, speeds in cells.items()}
    for what, least, ratios in (
        ("best arm", OF_BEST, best),
        ("plain", OF_PLAIN, plain),
        ("builtin's best block, where drafting pays", OF_BUILTIN, builtin),
    ):
        broken = [f"{' '.join(map(str, cell))}: {ratio:.2f}x" for cell, ratio in ratios.items() if ratio < least]
        worst = f", worst {min(ratios.values()):.2f}x" if ratios else ""
        yield f"adaptive >= {least}x of the {what}: {len(ratios) - len(broken)} of {len(ratios)} cells{worst}"
        yield from (f"  {line}" for line in broken)
    if all(any(map(is_fixed, speeds)) for speeds in cells.values()):
        block, gain = over_one_block(list(cells.values()))
        yield f"adaptive over the best single block ({block}), geometric mean: {gain:.2f}x, promised {OF_ONE_BLOCK}x"


def _row(cell: Cell, speeds: Speeds, arms: Sequence[str], mean_width: float | None) -> list[str]:
    named = [*map(str, cell), *(f"{speeds[arm]:.0f}" if arm in speeds else "-" for arm in arms)]
    if mean_width is None or not {PLAIN, *arms} <= speeds.keys():
        return [*named, "-", "-", "-", "-"]
    builtin = over_builtin(speeds)
    ratios = [over_best(speeds), speeds[ADAPTIVE] / speeds[PLAIN]]
    return [*named, f"{mean_width:.1f}", *(f"{r:.2f}x" for r in ratios), "-" if builtin is None else f"{builtin:.2f}x"]
