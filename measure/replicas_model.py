"""What one replica's speed says of many: queues that serve the faster, the more requests are in them.

A step of a batch brings tokens to every request in it, so a replica with n requests completes mu(n) a second, and mu
rises with n until all slots are taken. Measured with n requests always in flight, mu makes of a whole server one
station of a queueing network (Chandy, Herzog and Woo, 1975). With Poisson arrivals the number of requests in a replica
is then a birth-death chain. That is exact for exponential work, and for any distribution of it as long as every request
has a slot and all share alike (Baskett, Chandy, Muntz and Palacios, 1975); waiting for a slot is the approximation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from random import Random

_NEGLIGIBLE = 1e-12


class Rates:
    """Requests that a replica completes per second, by how many are in it.

    Args:
        measured: by number of requests. Between two numbers it is linear, below the first proportional, and beyond
            the last it stays.
        slots: how many requests are served at once; the others wait.
    """

    def __init__(self, measured: Mapping[int, float], slots: int) -> None:
        self.slots = slots
        self._points = [(0, 0.0), *sorted(measured.items())]
        self._known = [0.0]

    def __call__(self, requests: int) -> float:
        while len(self._known) <= requests:
            self._known.append(self._between(len(self._known)))
        return self._known[requests]

    @property
    def most(self) -> float:
        """The rate of a replica that is full."""
        return self._points[-1][1]

    def _between(self, requests: int) -> float:
        for (low, slow), (high, fast) in zip(self._points, self._points[1:], strict=False):
            if requests <= high:
                return slow + (fast - slow) * (requests - low) / (high - low)
        return self.most


@dataclass(frozen=True)
class Load:
    """What a replica holds, mean over time and replicas.

    Attributes:
        requests: in it.
        waiting: of them, those without a slot.
        arrivals: per second and replica.
    """

    requests: float
    waiting: float
    arrivals: float

    @property
    def seconds(self) -> float:
        """From a request's arrival to its answer, mean (Little, 1961)."""
        return self.requests / self.arrivals

    @property
    def waiting_seconds(self) -> float:
        """Of them, before a slot is free."""
        return self.waiting / self.arrivals


def split_at_random(rates: Rates, arrivals: float) -> Load:
    """A replica's steady state.

    Args:
        arrivals: per second, at this replica: a Poisson stream that is split at random stays one.
    """
    if arrivals >= rates.most:
        return Load(inf, inf, arrivals)
    weight = total = 1.0
    number, requests, waiting = 0, 0.0, 0.0
    # From the last measured number on each weight is the one before times a constant below 1.
    while weight > _NEGLIGIBLE * total or number < rates.slots:
        number += 1
        weight *= arrivals / rates(number)
        total += weight
        requests += number * weight
        waiting += max(0.0, number - rates.slots) * weight
    return Load(requests / total, waiting / total, arrivals)


def simulate(
    rates: Rates,
    arrivals: float,
    replicas: int,
    choices: int,
    seconds: float,
    rng: Random,
    warm_up: float = 0.0,
    begin: int = 0,
) -> Load:
    """The chain of several replicas, simulated.

    Replicas are alike, so what is kept is how many of them hold how many requests.

    Args:
        arrivals: per second, at all replicas together.
        choices: a request goes to the emptiest of so many replicas drawn at random: 1 splits at random, ``replicas``
            takes the least loaded of all.
        seconds: of the clock; what is before ``warm_up`` is not counted.
        begin: requests in each replica at first.
    """
    holding = [0] * begin + [replicas]  # how many replicas hold 0, 1, 2, … requests
    held, queued = replicas * begin, replicas * max(0, begin - rates.slots)
    clock = requests = waiting = 0.0
    rate = replicas * rates(begin)
    while clock < seconds:
        total = arrivals + rate
        step = rng.expovariate(total)
        counted = max(0.0, min(clock + step, seconds) - max(clock, warm_up))
        requests += counted * held
        waiting += counted * queued
        clock += step
        event = rng.random() * total - arrivals
        if event < 0:
            emptiest = min(rng.sample(range(replicas), choices)) if choices < replicas else 0
            number, by = _level(holding, emptiest), 1
        else:
            number, by = _level([count * rates(n) for n, count in enumerate(holding)], event), -1
        _move(holding, number, by)
        held += by
        queued += by * (max(number, number + by) > rates.slots)
        rate += rates(number + by) - rates(number)
    mean = 1 / (replicas * (seconds - warm_up))
    return Load(requests * mean, waiting * mean, arrivals / replicas)


def _level(parts: Sequence[float], place: float) -> int:
    """In which of consecutive parts a place is; rounding may put it behind the last."""
    for number, part in enumerate(parts):
        place -= part
        if place < 0:
            return number
    return len(parts) - 1


def _move(holding: list[int], number: int, by: int) -> None:
    holding[number] -= 1
    if number + by == len(holding):
        holding.append(0)
    holding[number + by] += 1
    while not holding[-1]:
        holding.pop()
