"""Isotonic regression: the nearest sequence that never falls."""

from __future__ import annotations

from collections.abc import Sequence


def isotonic(values: Sequence[float], variances: Sequence[float]) -> Sequence[float]:
    """Minimise the squared distances over their variances (pool adjacent violators)."""
    if list(values) == sorted(values):
        return values
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, variance in zip(values, variances, strict=True):
        weight, count = 1 / variance, 1
        while pools and pools[-1][0] > value:
            mean, mass, members = pools.pop()
            value = (mean * mass + value * weight) / (mass + weight)
            weight, count = mass + weight, count + members
        pools.append((value, weight, count))
    return [mean for mean, _, members in pools for _ in range(members)]
