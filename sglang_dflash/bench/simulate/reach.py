"""How far from its anchor the drafter would still have got a token.

A recording shows each token of an answer at one distance from its anchor; another width would have drafted it from
another. The model gives every token a difficulty u, uniform in [0, 1], and has the draft at distance j stand if
u < H(j), where H(j) is the recorded share of drafts at distance j that stood, made non-increasing. A draft that stood
at distance j leaves u uniform in [0, H(j)), one that was rejected in [H(j), 1). A token that was never drafted takes
the difficulty of another one of the same answer.

So hard and easy passages, and answers, stay where they were recorded. With independent positions, whose H is their
acceptance, the replay has exactly the recorded law.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from sglang_dflash.bench.simulate.recording import Answer


def acceptance(answers: Iterable[Answer], widest: int) -> list[float]:
    """H(0), H(1), ..., H(widest - 1): share of the drafts at each distance that stood, non-increasing; H(0) = 1."""
    stood, drafted = [0.0] * widest, [0.0] * widest
    for answer in answers:
        for distance, accepted in zip(answer.distance, answer.accepted, strict=True):
            if 0 < distance < widest:
                drafted[distance] += 1
                stood[distance] += accepted
    return [1.0, *_non_increasing(stood[1:], drafted[1:])]


def _non_increasing(stood: list[float], drafted: list[float]) -> list[float]:
    """Shares pooled with their neighbours until none is above the one before (pool adjacent violators)."""
    pools: list[list[float]] = []  # stood, drafted, positions
    for s, n in zip(stood, drafted, strict=True):
        pools.append([s, n, 1])
        while len(pools) > 1 and pools[-1][0] * pools[-2][1] >= pools[-2][0] * pools[-1][1]:
            last = pools.pop()
            pools[-1] = [a + b for a, b in zip(pools[-1], last, strict=True)]
    return [s / n if n else 0.0 for s, n, positions in pools for _ in range(int(positions))]


def difficulties(answer: Answer, acceptance: list[float], random: Random) -> list[float]:
    """One draw of an answer's difficulties, and of a block's more: drafts behind its end are verified too."""
    drawn: list[float | None] = []
    for distance, accepted in zip(answer.distance, answer.accepted, strict=True):
        low, high = (0.0, acceptance[distance]) if accepted else (acceptance[distance], 1.0)
        drawn.append(random.uniform(low, high) if distance else None)
    known = [u for u in drawn if u is not None]
    more = [None] * len(acceptance)
    return [u if u is not None else random.choice(known) if known else random.random() for u in [*drawn, *more]]


def accepted_from(difficulties: list[float], start: int, width: int, acceptance: list[float]) -> int:
    """Accepted drafts + bonus of a block of ``width`` whose first draft is token ``start``."""
    accept = 1
    while accept < width and difficulties[start + accept - 1] < acceptance[accept]:
        accept += 1
    return accept
