"""Costs read from measured steps."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from sglang_dflash.bench.simulate.costs import step_costs
from sglang_dflash.bench.step_log import Decode, Prefill, Step
from sglang_dflash.errors import DFlashError


def decode(batch_size: int, width: int, context: int, ms: float | None) -> Decode:
    each = (1,) * batch_size
    return Decode(0.0, ("a",) * batch_size, width, (width,) * batch_size, each, context, ms)


def steps(sizes: tuple[int, ...] = (1, 4)) -> list[Step]:
    """ms = 5 + size * width + context / 100, prefills of 2 ms + 0.1 ms a token, some steps not measured."""
    random = Random(0)
    made: list[Step] = [Prefill(0.0, ("a",), tokens, 2 + 0.1 * tokens) for tokens in (10, 50, 90)]
    for size in sizes:
        for width in (1, 8):
            for _ in range(20):
                context = random.randrange(1000)
                made.append(decode(size, width, context, 5 + size * width + context / 100))
            made.append(decode(size, width, 0, None))
    return made


def test_costs_by_batch_size_width_and_context():
    costs = step_costs(steps())
    assert costs.widths == [1, 8]
    assert costs.step_ms(4, 8, 500) == pytest.approx(42)
    assert costs.step_ms(2, 8, 0) == pytest.approx(21)
    assert costs.per_token == pytest.approx(0.01)
    assert costs.prefill_ms(30) == pytest.approx(5)
    assert costs.noise == pytest.approx([1.0] * len(costs.noise))


def slow(step: Step) -> bool:
    return isinstance(step, Decode) and step.width == len(step.rids) == 8


def test_a_pair_that_is_off_the_plane_is_as_it_was_measured():
    """From 8 requests on, every step takes 100 ms more at width 8: a plane cannot have that."""
    jump = [replace(s, ms=s.ms + 100 * slow(s)) for s in steps((1, 4, 8)) if s.ms]
    costs = step_costs(jump)
    assert costs.step_ms(8, 8, 0) == pytest.approx(169)
    assert costs.step_ms(4, 8, 0) == pytest.approx(37)


def test_a_batch_smaller_than_any_recorded_is_cheaper():
    costs = step_costs([s for s in steps((4, 8)) if s.ms])
    assert costs.step_ms(1, 8, 0) == pytest.approx(13)


def test_a_pause_of_the_machine_is_no_cost_of_a_width():
    costs = step_costs([*steps(), decode(4, 8, 500, 4000.0)])
    assert costs.step_ms(4, 8, 500) == pytest.approx(42)


def test_what_was_not_recorded_is_refused():
    costs = step_costs(steps())
    with pytest.raises(DFlashError, match="a batch of 5 at width 8"):
        costs.step_ms(5, 8, 0)
    with pytest.raises(DFlashError, match="width 4"):
        costs.step_ms(1, 4, 0)


def test_a_prefill_without_a_time_of_its_own_lasts_until_the_next_step():
    prefill, decoded = Prefill(3.0, ("a",), 40, None), replace(decode(1, 1, 0, 1.0), at=3.025)
    costs = step_costs([prefill, decoded, *steps()[3:]])
    assert costs.prefill_ms(40) == pytest.approx(25)


def test_a_log_without_measured_steps_is_refused():
    with pytest.raises(DFlashError, match="0 measured prefills"):
        step_costs([decode(1, 1, 0, None)])
