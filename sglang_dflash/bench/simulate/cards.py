"""The published cards' cells: what the policy would choose there, and what it would gain over each fixed block.

A card publishes accept length A(B) and output tok/s by block B, task and concurrency c. From them, for every cell:

* survival: the chance h of a draft, given that those before it stood, is constant between published blocks, so that
  A(B') - A(B) = S(B - 1) (h + h^2 + ... + h^(B' - B)), with S(j) the share of blocks whose draft j stands and
  S(0) = A(1) = 1;
* milliseconds of a step: 1000 c A(B) / (tok/s), with width 1 from plain decoding. Prefill and scheduling are in them,
  as in the published figures. Between published widths they are taken as linear, and such a width is marked.

The policy then serves c requests without end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import exp, fsum, log
from operator import mul
from random import Random
from statistics import fmean

import numpy as np

from sglang_dflash.bench.modes import AR
from sglang_dflash.bench.settings import published_pairs
from sglang_dflash.bench.tables import MISSING, Table
from sglang_dflash.errors import DFlashError
from sglang_dflash.width import AdaptiveWidth, CostTable

OURS = "dflash"
WIDTHS = (1, 2, 4, 8, 16)
_STEPS, _WARM_UP = 3000, 300
_NOISE = 0.05  # of a step's time, as the policy sees it


@dataclass(frozen=True)
class CardCell:
    """Published figures of one load.

    Attributes:
        speed: output tok/s by width; 1 is plain decoding.
        accept: tokens per step by width; 1.0 at width 1.
    """

    card: str
    task: str
    concurrency: int
    speed: dict[int, float]
    accept: dict[int, float]

    def milliseconds(self, width: int) -> float:
        """Of a step: published, or linear between the published widths around it."""
        published = sorted(self.speed)
        ms = [1000 * self.concurrency * self.accept[w] / self.speed[w] for w in published]
        return float(np.interp(width, published, ms))


@dataclass(frozen=True)
class Choice:
    """What the policy came to in a cell: the width it used most, and output tok/s with its exploration."""

    cell: CardCell
    width: int
    tokens_per_s: float


def cells() -> Iterator[CardCell]:
    """Every cell of the cards that publish throughput and accept length."""
    for name, card in published_pairs().items():
        accept = {(row["task"], row["block"]): row["accept_length"] for row in card["accept"] if row["arm"] == OURS}
        speed: dict[tuple[str, int], dict[int, float]] = {}
        for row in card["speed"]:
            if row["arm"] in (AR, OURS):
                speed.setdefault((row["task"], row["concurrency"]), {})[row["block"] or 1] = row["tokens_per_s"]
        for (task, concurrency), by_width in speed.items():
            lengths = {width: 1.0 if width == 1 else accept[task, width] for width in by_width}
            yield CardCell(name, task, concurrency, by_width, lengths)


def without_figures() -> list[str]:
    """Cards that publish no throughput."""
    return [name for name, card in published_pairs().items() if not card["speed"]]


def survival(accept: Mapping[int, float]) -> list[float]:
    """S(1), ..., S(widest - 1) from accept lengths by width, width 1 among them.

    Raises:
        DFlashError: accept lengths that no survival has.
    """
    curve = [1.0]
    for (narrow, low), (wide, high) in pairwise(sorted(accept.items())):
        drafts, alive = wide - narrow, curve[-1]
        if not 0 < high - low <= drafts * alive:
            raise DFlashError(
                f"accept lengths {low} at width {narrow} and {high} at width {wide}",
                expected=f"a difference in (0, {drafts * alive:.2f}]",
                remedy="compare with the card",
            )
        hazard = _hazard((high - low) / alive, drafts)
        curve += accumulate([hazard] * drafts, mul, initial=alive)
        del curve[-drafts - 1]
    return curve[1:]


def _hazard(tokens: float, drafts: int) -> float:
    """h with h + h^2 + ... + h^drafts = tokens, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if fsum(middle**i for i in range(1, drafts + 1)) < tokens else (low, middle)
    return high


def choose(cell: CardCell, seed: int = 0) -> Choice:
    """The policy in a cell, for some thousand steps after it has learned."""
    widths = tuple(width for width in WIDTHS if width <= max(cell.speed))
    ms = {width: cell.milliseconds(width) for width in widths}
    policy = AdaptiveWidth(
        widths, CostTable.calibrated({(cell.concurrency, width): ms[width] for width in widths}), ragged=False
    )
    dies = [1 - alive for alive in survival(cell.accept)]
    random, used, tokens, time = Random(seed), Counter[int](), 0, 0.0
    for step in range(_WARM_UP + _STEPS):
        width = policy.width(cell.concurrency, 0)
        accept = [1 + min(bisect_right(dies, random.random()), width - 1) for _ in range(cell.concurrency)]
        policy.observe(width, accept)
        policy.observe_time(cell.concurrency, width, 0, ms[width] * random.gauss(1, _NOISE))
        if step >= _WARM_UP:
            used[width] += 1
            tokens += sum(accept)
            time += ms[width]
    ((most, _),) = used.most_common(1)
    return Choice(cell, most, 1000 * tokens / time)


def card_table(choices: list[Choice]) -> Table:
    """One line per cell, and the geometric means below."""
    fixed = sorted({width for choice in choices for width in choice.cell.speed})
    rows = []
    for choice in choices:
        cell = choice.cell
        width = f"{choice.width}{'' if choice.width in cell.speed else ' ~'}"
        gains = [f"{choice.tokens_per_s / cell.speed[w]:.2f}" if w in cell.speed else MISSING for w in fixed]
        rows.append([cell.card, cell.task, str(cell.concurrency), width, f"{choice.tokens_per_s:.0f}", *gains])
    means = [
        exp(fmean(log(choice.tokens_per_s / choice.cell.speed[w]) for choice in choices if w in choice.cell.speed))
        for w in fixed
    ]
    rows.append(["geometric mean", "", "", "", "", *(f"{mean:.2f}" for mean in means)])
    return Table(
        "The policy in the cards' cells",
        f"the width used most, ~ if the card does not publish it, so that its cost is interpolated; tok/s with the "
        f"policy's exploration; that over the published tok/s of plain decoding and of each block. "
        f"No throughput published: {', '.join(without_figures())}",
        ["card", "task", "c", "width", "tok/s", *("over plain" if w == 1 else f"over {w}" for w in fixed)],
        rows,
    )
