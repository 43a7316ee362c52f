"""Step times on a grid of batch sizes and widths: filled in from a few measured points, and made monotone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
"""Rows of a grid without any point."""
PRIOR_TOKEN_SHARE = 0.05
"""Without better knowledge, a token more costs this share of a step that does nothing."""

LEAST_MS = 1e-6

Points = Mapping[tuple[int, int], float]
"""Milliseconds by (batch size, width)."""


def rows(points: Points) -> tuple[int, ...]:
    """Batch sizes of the grid: those measured, and a second one if only one was, since a line needs two."""
    sizes = tuple(sorted({batch_size for batch_size, _ in points}))
    if not sizes:
        return BATCH_SIZES
    return sizes if len(sizes) > 1 else (sizes[0], 2 * sizes[0])


def line(points: Points) -> tuple[float, float]:
    """The plane ``ms = a + b * batch_size * width`` with the least relative error -> a, b, neither below 0."""
    if not points:
        return 1.0, PRIOR_TOKEN_SHARE
    # Normal equations of sum over points of ((a + b * x) / y - 1) ** 2.
    aa = ab = bb = ra = rb = 0.0
    for (batch_size, width), ms in points.items():
        u, v = 1 / ms, batch_size * width / ms
        aa, ab, bb, ra, rb = aa + u * u, ab + u * v, bb + v * v, ra + u, rb + v
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb:  # all points at one x
        scale = (ra + PRIOR_TOKEN_SHARE * rb) / (
            aa + 2 * PRIOR_TOKEN_SHARE * ab + PRIOR_TOKEN_SHARE * PRIOR_TOKEN_SHARE * bb
        )
        return scale, scale * PRIOR_TOKEN_SHARE
    a, b = (ra * bb - rb * ab) / determinant, (rb * aa - ra * ab) / determinant
    if a <= 0:
        return 0.0, rb / bb
    return (a, b) if b > 0 else (ra / aa, 0.0)


def complete(
    points: Points, batch_sizes: Sequence[int], widths: Sequence[int], plane: tuple[float, float] | None = None
) -> list[list[float]]:
    """-> milliseconds ``[batch size][width]``, as measured: not yet monotone.

    A missing width lies on the line between the measured ones of its batch size; a batch size with fewer than two takes
    what it lacks from the plane (default: the one through all points).
    """
    a, b = plane or line(points)
    grid: list[list[float]] = []
    for batch_size in batch_sizes:
        measured = sorted((width, ms) for (size, width), ms in points.items() if size == batch_size)
        row: list[float] = []
        for width in widths:
            ms = along(measured, width) if len(measured) > 1 else a + b * batch_size * width
            ms = points.get((batch_size, width), ms)
            row.append(max(ms, LEAST_MS))
        grid.append(row)
    return grid


def along(measured: Sequence[tuple[int, float]], x: float) -> float:
    """The value at ``x`` on the line through its two nearest neighbours of at least two points, ascending."""
    right = 1
    while right < len(measured) - 1 and measured[right][0] < x:
        right += 1
    (x0, y0), (x1, y1) = measured[right - 1], measured[right]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def isotonic(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest sequence that never falls, in weighted least squares: pool adjacent violators."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, weight in zip(values, weights, strict=True):
        count = 1
        while pools and pools[-1][0] > value:
            mean, mass, members = pools.pop()
            value = (mean * mass + value * weight) / (mass + weight)
            weight, count = mass + weight, count + members
        pools.append((value, weight, count))
    return [mean for mean, _, members in pools for _ in range(members)]
