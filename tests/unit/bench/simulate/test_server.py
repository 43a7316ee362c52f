"""The simulated server, against what can be counted by hand."""

from __future__ import annotations

from random import Random

import pytest

from sglang_dflash.bench.simulate.costs import StepCosts
from sglang_dflash.bench.simulate.server import Outcome, Replayed, Server
from sglang_dflash.width import FixedWidth

COSTS = StepCosts((5.0, 5.0, 0.0, 0.0), 1.0, {4: ([1, 2], [1.0, 1.0])}, 0.0, [1.0], (5.0, 0.1))
ALWAYS = [1.0, 1.0, 1.0, 1.0]


def serve(
    users: int, answers: int, in_vain: int = 0, outside_ms: float = 0.0, policy: FixedWidth | None = None
) -> Outcome:
    """Answers of eight tokens, every draft accepted: two steps of width 4 each."""
    todo = [Replayed(20, 8, [0.5] * 12) for _ in range(answers)]
    return Server(COSTS, ALWAYS, in_vain, outside_ms).serve(todo, users, policy or FixedWidth(4), Random(0))


def test_one_user():
    outcome = serve(1, 3)
    assert outcome.seconds == pytest.approx(3 * (7 + 10 + 10) / 1000)
    assert (outcome.tokens, outcome.steps) == (3 * 9, 6)
    assert (outcome.mean_width, outcome.accept_length) == (4, 4.5)


def test_two_users_share_steps_and_prefills():
    assert serve(2, 4).seconds == pytest.approx(2 * (9 + 15 + 15) / 1000)


def test_a_step_is_launched_before_the_end_of_an_answer_is_known():
    """The next question meets it; the last answer's time ends with the answer."""
    assert serve(1, 3, in_vain=1).seconds == pytest.approx((3 * (7 + 10 + 10) + 2 * 10) / 1000)


def test_users_take_their_time():
    assert serve(1, 3, outside_ms=50).seconds == pytest.approx((3 * 27 + 2 * 50) / 1000)


def test_a_step_is_told_to_the_policy_once_the_next_is_launched():
    calls = []

    class Noting(FixedWidth):
        def width(self, batch_size: int, context: int = 0) -> int:
            calls.append(f"width {batch_size}")
            return 4

        def observe(self, width, accept_lens, verify_lens=None) -> None:
            calls.append(f"{width}: {accept_lens}")

        def observe_time(self, batch_size: int, width: int, context: int, milliseconds: float) -> None:
            calls.append(f"{milliseconds} ms")

    serve(2, 2, policy=Noting(4))
    assert calls == ["width 2", "width 2", "4: [4, 4]", "15.0 ms"]
