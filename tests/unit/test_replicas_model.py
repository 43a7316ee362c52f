"""The queueing model against closed forms."""

from __future__ import annotations

from math import factorial, inf
from random import Random

import pytest

from measure.replicas_model import Rates, simulate, split_at_random

ENDLESS = 10_000


def test_rates_are_linear_between_what_was_measured_and_stay_beyond() -> None:
    rates = Rates({2: 3.0, 4: 4.0}, slots=4)
    assert [rates(n) for n in (4, 1, 2, 3, 0, 9)] == [4.0, 1.5, 3.0, 3.5, 0.0, 4.0]
    assert rates.most == 4.0


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_one_server_is_m_m_1(share: float) -> None:
    load = split_at_random(Rates({1: 2.0}, slots=1), 2.0 * share)
    assert load.requests == pytest.approx(share / (1 - share))
    assert load.waiting == pytest.approx(share**2 / (1 - share))
    assert load.seconds == pytest.approx(1 / (2.0 - 2.0 * share))


@pytest.mark.parametrize(("servers", "share"), [(2, 0.5), (8, 0.3), (8, 0.9)])
def test_slots_of_a_fixed_speed_are_m_m_c(servers: int, share: float) -> None:
    """Erlang's C: the chance to wait, and with it the queue."""
    speed, offered = 0.7, servers * share
    busy = offered**servers / factorial(servers) / (1 - share)
    waits = busy / (busy + sum(offered**n / factorial(n) for n in range(servers)))
    load = split_at_random(Rates({servers: speed * servers}, slots=servers), speed * offered)
    assert load.waiting == pytest.approx(waits * share / (1 - share))
    assert load.waiting_seconds == pytest.approx(waits / (servers * speed - speed * offered))
    assert load.seconds == pytest.approx(load.waiting_seconds + 1 / speed)


def test_a_replica_that_gets_more_than_it_can_is_full_for_ever() -> None:
    assert split_at_random(Rates({1: 1.0, 4: 2.0}, slots=4), 2.0).requests == inf


@pytest.mark.parametrize("replicas", [1, 3])
def test_the_simulation_at_random_is_the_chain(replicas: int) -> None:
    rates = Rates({1: 1.0, 4: 2.5, 8: 3.0}, slots=8)
    expected = split_at_random(rates, 2.4)
    found = simulate(rates, 2.4 * replicas, replicas, 1, 6_000 / replicas, Random(1), warm_up=100)
    assert found.requests == pytest.approx(expected.requests, rel=0.08)
    assert found.waiting == pytest.approx(expected.waiting, rel=0.25)


def test_choosing_does_not_matter_where_nobody_slows_anybody() -> None:
    """M/M/inf: a request's time is its own."""
    rates = Rates({ENDLESS: 0.5 * ENDLESS}, slots=ENDLESS)
    for choices in (1, 3):
        load = simulate(rates, 9.0, 3, choices, 1_000, Random(2), warm_up=50)
        assert load.seconds == pytest.approx(2.0, rel=0.05)
        assert load.waiting == 0


def test_two_choices_among_many_are_the_mean_field() -> None:
    """Mitzenmacher, 1996: the share of M/M/1 queues with i or more requests is rho ** (2**i - 1)."""
    share = 0.8
    expected = sum(share ** (2**i - 1) for i in range(1, 9))
    found = simulate(Rates({1: 1.0}, slots=1), 200 * share, 200, 2, 50, Random(3), warm_up=20)
    assert found.requests == pytest.approx(expected, rel=0.06)


def test_the_least_loaded_of_two_lies_between_one_queue_and_two() -> None:
    rates, arrivals = Rates({1: 1.0}, slots=1), 1.0
    together = split_at_random(Rates({2: 2.0}, slots=2), arrivals).requests / 2
    apart = split_at_random(rates, arrivals / 2).requests
    found = simulate(rates, arrivals, 2, 2, 8_000, Random(4), warm_up=100).requests
    assert together * 1.02 < found < apart * 0.85


def test_what_comes_before_the_warm_up_is_not_counted() -> None:
    """Nothing completes: requests pile up, and the mean is taken behind the warm-up."""
    never = Rates({1: 1e-9}, slots=1)
    late = simulate(never, 10.0, 1, 1, 20.0, Random(5), warm_up=10.0)
    assert late.requests == pytest.approx(150, rel=0.2)
