"""Where the texts of ``bfloat16.py`` first differ from plain decoding's, and how undecided the target is there.

python -m measure.bfloat16_table FOLDER

A step is what two neighbouring bfloat16 numbers of a logit's size are apart: 2^-7 of its power of two, 0.125 from 16 to
32. Rounding two logits once moves their gap by up to one step; the rounding of every layer's output comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from measure.bfloat16 import HELD_OUT, RANDOM, Lines, Text, file_of
from sglang_dflash.bench.tables import MISSING, Table, number
from sglang_dflash.pairs import NAMES

Texts = Mapping[str, Text]


@dataclass(frozen=True)
class Difference:
    """The first position at which a text leaves plain decoding's.

    The gaps are of plain decoding's token over the arm's, after the same tokens: negative where the arm's is the more
    likely one, infinite where one of them is not among the recorded.

    Attributes:
        prompt: its name.
        position: new tokens before it.
        decode: gap in plain decoding.
        arm: gap in the forward that chose the arm's token.
        prefill: gap in a prefill of the same server.
        float32: gap in transformers.
        step: bfloat16 step at the size of the larger logit.
    """

    prompt: str
    position: int
    decode: float
    arm: float
    prefill: float
    float32: float
    step: float

    @property
    def steps(self) -> float:
        """The float32 gap in steps, whoever is ahead."""
        return abs(self.float32) / self.step


def first_difference(plain: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Position at which two texts stop being equal; the length of the shorter one if that is all of it."""
    pairs = zip_longest(plain, tokens)
    return next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), None)


def gap(top: Sequence[tuple[int, float]], token: int, other: int) -> float:
    values = dict(top)
    return values[token] - values[other] if token in values and other in values else math.inf


def step_at(logit: float) -> float:
    """Distance of neighbouring bfloat16 numbers, which have 8 significant bits, at ``logit``."""
    return math.ldexp(1.0, math.frexp(logit)[1] - 8)


@dataclass(frozen=True)
class Comparison:
    """An arm beside plain decoding on the prompts of one kind.

    Attributes:
        texts: compared.
        tokens: compared: up to the first difference, and it.
        differences: one of every text that differs.
        changes: how much the gap of the two most likely tokens moves from plain decoding to the arm, at every compared
            position, in steps.
    """

    texts: int
    tokens: int
    differences: list[Difference]
    changes: list[float]


def compare(plain: Texts, arm: Texts, prefill: Texts, reference: Texts, kind: str) -> Comparison:
    tokens, differences, changes = 0, [], []
    views = (plain, arm, prefill, reference)
    names = [name for name in plain if name.startswith(kind) and all(name in view for view in views)]
    for name in names:
        ours, theirs, exact = plain[name], arm[name], reference[name]
        position = first_difference(ours.tokens, theirs.tokens)
        compared = len(ours.tokens) if position is None else position + 1
        tokens += compared
        for before, top, logits in zip(ours.tops[:compared], theirs.tops, exact.tops, strict=False):
            (first, _), (second, _) = before[:2]
            change = gap(before, first, second) - gap(top, first, second)
            changes.append(abs(change) / step_at(logits[0][1]))
        if position is not None:
            choices = ours.tokens[position], theirs.tokens[position]
            decode, chosen, again, precise = (gap(view[name].tops[position], *choices) for view in views)
            step = step_at(exact.tops[position][0][1])
            differences.append(Difference(name, position, decode, chosen, again, precise, step))
    return Comparison(len(names), tokens, differences, changes)


# What plain decoding's bfloat16 text is compared with: title, dtype and file.
SPECULATING = {
    "ours, 16": "dflash:16",
    "ours, 8": "dflash:8",
    "ours, 4": "dflash:4",
    "builtin, 16": "builtin:16",
}
ARMS = {
    **{title: ("bfloat16", name) for title, name in SPECULATING.items()},
    "plain, other batches": ("bfloat16", "ar again"),
    "plain, float32": ("float32", "ar"),
}
NEAR = 4  # steps within which the target counts as undecided
DIFFERENCES = [
    *("pair", "prompts", "arm", "texts", "differ", "per 1,000 tokens", "gap", "largest", "in steps", "largest"),
    *(f"over {NEAR}", "accept length", "in float32"),
]
CHANGES = ["pair", "arm", "positions", "changed", "99 %", "largest", "largest at a first difference"]


class Results:
    """What a folder holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def texts(self, pair: str, dtype: str, name: str) -> Texts:
        return Lines(file_of(self._folder, pair, dtype, name)).texts

    def comparisons(self, kind: str) -> Iterator[tuple[str, str, Comparison]]:
        """Pair, arm and comparison of every arm that has been measured, on the prompts of a kind; '' for all."""
        for pair in NAMES:
            views = [self.texts(pair, "bfloat16", name) for name in ("ar", "prefill", "reference")]
            for arm, arguments in ARMS.items():
                found = compare(views[0], self.texts(pair, *arguments), views[1], views[2], kind)
                if found.texts:
                    yield pair, arm, found

    def float32(self) -> Iterator[str]:
        """How many texts differ in float32."""
        for pair in NAMES:
            plain = self.texts(pair, "float32", "ar")
            for arm, name in SPECULATING.items():
                texts = self.texts(pair, "float32", name)
                both = [each for each in texts if each in plain]
                found = (gap_at_first_difference(plain[each], texts[each]) for each in both)
                gaps = [each for each in found if each is not None]
                apart = f", where logits are {', '.join(f'{each:.1e}' for each in gaps)} apart" if gaps else ""
                if both:
                    yield f"float32, {pair}, {arm}: {len(gaps)} of {len(both)} texts differ{apart}"


def gap_at_first_difference(plain: Text, arm: Text) -> float | None:
    """Gap, in plain decoding, of its token over the arm's; None if the texts are equal."""
    position = first_difference(plain.tokens, arm.tokens)
    return None if position is None else gap(plain.tops[position], plain.tokens[position], arm.tokens[position])


def accept_length(texts: Texts, kind: str) -> float:
    """New tokens per verified block over all texts of a kind; the first token of each comes from its prefill."""
    found = [text for name, text in texts.items() if name.startswith(kind)]
    blocks = sum(text.blocks for text in found)
    return sum(len(text.tokens) - 1 for text in found) / blocks if blocks else math.nan


def spread(values: Sequence[float], digits: int) -> list[str]:
    """Median and largest."""
    return [number(median(values), digits), number(max(values), digits)] if values else [MISSING, MISSING]


def difference_row(found: Comparison) -> list[str]:
    rate = 1000 * len(found.differences) / found.tokens
    gaps, steps = (
        zip(*((abs(d.float32), d.steps) for d in found.differences), strict=True) if found.differences else ((), ())
    )
    far = sum(step > NEAR for step in steps)
    counts = [str(found.texts), str(len(found.differences)), number(rate)]
    return [*counts, *spread(gaps, 3), *spread(steps, 2), str(far)]


def change_row(found: Comparison) -> list[str]:
    ordered = sorted(found.changes)
    at_difference = [(d.decode - d.arm) / d.step for d in found.differences]
    return [
        str(len(ordered)),
        f"{sum(change > 0.01 for change in ordered) / len(ordered):.0%}",
        number(ordered[int(0.99 * len(ordered))]),
        number(ordered[-1]),
        number(max(at_difference)) if at_difference else MISSING,
    ]


def main(folder: Annotated[Path, typer.Argument(help="Written by bfloat16.py.")]) -> None:
    """Print every first difference, and the tables."""
    results = Results(folder)
    rows = []
    for kind in (HELD_OUT, RANDOM):
        for pair, arm, found in results.comparisons(kind):
            files = [results.texts(pair, dtype, SPECULATING.get(arm, "")) for dtype in ("bfloat16", "float32")]
            lengths = [number(accept_length(texts, kind)) for texts in files]
            rows.append([pair, kind, arm, *difference_row(found), *lengths])
            for difference in found.differences:
                typer.echo(f"{pair}, {arm}: {difference}")
    changes = [[pair, arm, *change_row(found)] for pair, arm, found in results.comparisons("")]
    typer.echo("\n".join(results.float32()) + "\n")
    typer.echo(Table("", "", DIFFERENCES, rows).markdown() + "\n")
    typer.echo(Table("", "", CHANGES, changes).markdown())


if __name__ == "__main__":
    typer.run(main)
