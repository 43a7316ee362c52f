"""One kind of input: how it is made, put in place, and given to the package."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import process_time
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tests.fuzz.judge import Judge
from tests.fuzz.values import WILD

_PER_DRAW = 20  # inputs made of the values that hypothesis draws at a time
_CHUNK = 200  # draws after which hypothesis forgets what it has tried: its memory of them grows


@dataclass(frozen=True)
class Part:
    """Inputs of one kind.

    Attributes:
        name: in the table.
        make: an input, of some values that hypothesis has drawn.
        call: what is under test.
        share: inputs of a full run.
        prepare: puts an input in place before it is looked at.
        folder: the only place that may be opened meanwhile; None for nothing at all.
        values: what hypothesis draws.
    """

    name: str
    make: Callable[[Random, list[Any]], Any]
    call: Callable[[Any], object]
    share: int
    prepare: Callable[[Any], object] = lambda _: None
    folder: Path | None = None
    values: SearchStrategy[Any] = WILD


@dataclass(frozen=True)
class Outcome:
    """What came of a part; ``seconds`` of CPU, as the machine may be shared."""

    part: Part
    judge: Judge
    seconds: float


def run(part: Part, inputs: int, first_seed: int = 0) -> Outcome:
    """Look at ``inputs`` inputs, the same ones in every run."""
    judge, began = Judge(), process_time()
    with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):  # argparse's usage errors, by the thousand
        number = first_seed
        while judge.inputs < inputs:
            _chunk(part, judge, inputs, number)
            number += 1
    return Outcome(part, judge, process_time() - began)


def _chunk(part: Part, judge: Judge, inputs: int, number: int) -> None:
    draws = -(-(inputs - judge.inputs) // _PER_DRAW)

    @seed(number)
    @settings(
        max_examples=min(_CHUNK, draws),
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(part.values, min_size=3, max_size=6), st.integers(0, 2**32))
    def one(values: list[Any], start: int) -> None:
        random = Random(f"{number} {start}")
        for _ in range(_PER_DRAW):
            value = part.make(random, values)
            part.prepare(value)
            judge.look(part.call, value, part.folder)

    one()
