"""Predictions for a recording: every cell replayed under every policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from random import Random

from sglang_dflash.bench.modes import AR
from sglang_dflash.bench.simulate.cells import Cell, Measured, Recording, answers_by_task
from sglang_dflash.bench.simulate.costs import StepCosts, step_costs
from sglang_dflash.bench.simulate.reach import acceptance, difficulties
from sglang_dflash.bench.simulate.recording import check_widths
from sglang_dflash.bench.simulate.server import Outcome, Replayed, Server
from sglang_dflash.errors import DFlashError
from sglang_dflash.width import AdaptiveWidth, CostTable, FixedWidth, RandomWidth, WidthPolicy

_DRAWS, _FITTING_DRAWS = 8, 2
_LONGEST_OUTSIDE_MS = 1000.0
_BISECTIONS = 10
Policies = dict[str, Callable[[], WidthPolicy]]


@dataclass(frozen=True)
class Prediction:
    """An arm in a cell, predicted and, if the recording has it, measured."""

    arm: str
    cell: Cell
    outcome: Outcome
    over_plain: float
    measured: Measured | None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.outcome.tokens_per_s / self.measured.tokens_per_s if self.measured else None


def predict(recording: Recording, seed: int = 0) -> Iterator[Prediction]:
    """Every policy in every cell, plain decoding first.

    Raises:
        DFlashError: a recording of one width, without width 1, or with too few measured steps for a cell.
    """
    check_widths(recording.steps)
    costs = step_costs(recording.steps)
    if costs.widths[0] != 1:
        raise DFlashError(
            f"recorded widths {costs.widths}",
            expected="1 among them: plain decoding",
            remedy="record again with width 1",
        )
    by_task = answers_by_task(recording.cells)
    for cell in recording.cells:
        server = _server(cell, costs, acceptance(by_task[cell.task], costs.widths[-1]), seed)
        plain = None
        for arm, make in policies(costs, cell.concurrency, seed).items():
            outcome = replay(server, cell, make(), seed)
            plain = plain or outcome.tokens_per_s
            measured = recording.measured.get((arm, cell.task, cell.concurrency))
            yield Prediction(arm, cell, outcome, outcome.tokens_per_s / plain, measured)


def policies(costs: StepCosts, concurrency: int, seed: int) -> Policies:
    """By the names of a benchmark's arms. A policy is made anew for every cell, and learns in it.

    The adaptive one cuts no single requests: their drafts' probabilities are in no log.
    """
    widest = costs.widths[-1]
    fixed: Policies = {AR if width == 1 else f"dflash:{width}": partial(FixedWidth, width) for width in costs.widths}
    return {
        **fixed,
        f"random:{widest}": lambda: RandomWidth(costs.widths, seed),
        f"adaptive:{widest}": lambda: AdaptiveWidth(costs.widths, _calibrated(costs, concurrency), ragged=False),
    }


def replay(server: Server, cell: Cell, policy: WidthPolicy, seed: int, draws: int = _DRAWS) -> Outcome:
    """Every run of the cell, several times, each with difficulties of its own."""
    random, total = Random(seed), Outcome()
    for _ in range(draws):
        for run in cell.runs:
            answers = [Replayed(a.prompt, len(a.distance), difficulties(a, server.acceptance, random)) for a in run]
            total += server.serve(answers, cell.concurrency, policy, random)
    return total


def _server(cell: Cell, costs: StepCosts, acceptance: list[float], seed: int) -> Server:
    """The server on which a replay of the recording lasts as long as the recording did.

    What a user does between an answer and the next question is in no log. It is the one figure that is fitted; none of
    the arms to be predicted has a part in it.
    """

    def with_outside(ms: float) -> Server:
        return Server(costs, acceptance, round(cell.in_vain), ms)

    def excess(ms: float) -> float:
        policy = RandomWidth(costs.widths, seed)
        return replay(with_outside(ms), cell, policy, seed, _FITTING_DRAWS).seconds / _FITTING_DRAWS - (
            cell.seconds or 0.0
        )

    low, high = 0.0, _LONGEST_OUTSIDE_MS
    if cell.seconds is None or excess(low) >= 0:
        return with_outside(low)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return with_outside((low + high) / 2)


def _calibrated(costs: StepCosts, concurrency: int) -> CostTable:
    """As a server measures before it is ready: every width at powers of four, and at as many requests as may run."""
    sizes = [*(4**power for power in range(concurrency) if 4**power < concurrency), concurrency]
    points = {(size, width): costs.step_ms(size, width, 0) for size in sizes for width in costs.widths}
    return CostTable.calibrated(points)
