"""The most that adaptive width costs, of ``docs/settings.md``, on random cost tables and changes of traffic."""

from __future__ import annotations

from itertools import accumulate
from statistics import mean

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from sglang_dflash.width.adaptive import EVERY, SHARE
from sglang_dflash.width.survival import MEMORY
from tests.width.traffic import WIDTHS, Machine, adaptive, best_width, drive, rate

CHANGE, END = 200, 800
LATE = 3  # steps until a result is known and a small gain has lasted
HAZARDS = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.85, 0.97])


class Steps(Machine):
    """Each width takes ``1 + dearer`` times as long as the next narrower one, in a batch of any size."""

    def __init__(self, dearer: list[float]) -> None:
        super().__init__(0.0)
        self._taken = dict(zip(WIDTHS, accumulate(dearer, lambda ms, more: ms * (1 + more), initial=10.0), strict=True))

    def milliseconds(self, batch_size: int, width: int) -> float:
        return self._taken[width]


MACHINES = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(Steps)


def bound(machine: Machine, size: int, width: int) -> float:
    """Steps that a change may cost a policy that served at this width."""
    wider = WIDTHS[min(WIDTHS.index(width) + 1, len(WIDTHS) - 1)]
    dearer = machine.milliseconds(size, wider) / machine.milliseconds(size, width) - 1
    return 2 * MEMORY / size + max(EVERY, dearer / SHARE) + LATE


@hypothesis_settings(max_examples=25)
@given(MACHINES, HAZARDS, HAZARDS, st.sampled_from([1, 2, 8]))
def test_a_change_costs_at_most_the_documented_steps_and_then_a_share(machine, before, after, size):
    lost, most = [], []
    for seed in range(3):
        run = drive(adaptive(machine), machine, lambda step: before if step < CHANGE else after, END, size, seed)
        best = rate(machine, after, size, best_width(machine, after, size))
        regret = [ms - tokens / best for tokens, ms in zip(run.tokens, run.milliseconds, strict=True)]
        width = max(run.widths[CHANGE - 10 : CHANGE], key=run.widths[CHANGE - 10 : CHANGE].count)
        step = max(machine.milliseconds(size, w) for w in (width, best_width(machine, after, size)))
        lost.append(sum(regret[CHANGE:]) / step)
        most.append(bound(machine, size, width) + SHARE * sum(run.milliseconds[CHANGE:]) / step)
    assert mean(lost) <= mean(most), (lost, most)
