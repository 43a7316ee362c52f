"""The launches of a decode step, counted: a new one is noticed."""

from __future__ import annotations

import operator

import pytest

from tests.rehearsal.launches import CATCHES_UP, engines, most
from tests.rehearsal.run import run

# Graph replays and launches outside of graphs, the most of a step of each kind; docs/results/rehearsal.md has all. At
# adaptive widths 3 of them pass plainly decoded tokens to the drafter's graph.
LAUNCHES = {
    "hybrid, replayed": {"greedy, width 8": (2, 10), "sampled, width 8": (2, 16)},
    "hybrid, kept": {"greedy, width 8": (2, 14)},
    "hybrid, adaptive": {"greedy, width 1": (1, 10), **{f"greedy, width {width}": (2, 16) for width in (2, 4, 8)}},
    "dense": {"greedy, width 8": (2, 6)},
    "dense, draft window": {"greedy, width 8": (2, 7)},
}
# More of a step that injects before it drafts: tokens that the graph does not take. Arrivals decide which steps do.
BEFORE = 7


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", LAUNCHES)
def test_a_step_launches_no_more_than_before(engine: str) -> None:
    outcome, expected = run(engines()[engine], rehearse=True), dict(LAUNCHES[engine])
    assert not outcome.error, outcome.error
    expected |= {f"{kind}{CATCHES_UP}": (graphs, outside + BEFORE) for kind, (graphs, outside) in expected.items()}
    found = {kind: counts[:2] for kind, counts in most(outcome.report["steps"]).items()}
    more = {kind: counts for kind, counts in found.items() if any(map(operator.gt, counts, expected[kind]))}
    assert not more, f"more than {expected}"
