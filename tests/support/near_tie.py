"""Where two greedy texts of one target may diverge by rounding: at a near-tie of its two most likely tokens.

In bfloat16 the forward of a block rounds differently from the forward of one token, so DFLASH and plain decoding may
choose differently where the target is nearly undecided, and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tests.support.generation import Answer

# Logits of 16 to 32 are 0.125 apart in bfloat16; each of the two may be off by two such steps.
BF16_GAP = 0.5

# Share of the texts that may diverge at a near-tie.
SHARE = 0.25

Top = Sequence[tuple[float, int]]


def divergence(ours: Sequence[int], plain: Sequence[int], tops: Sequence[Top], gap: float) -> int | None:
    """The first position at which two texts differ, if the target is nearly undecided there.

    Args:
        ours: new tokens.
        plain: the target's own.
        tops: for each of ``plain``, the largest log-probabilities before it and their tokens, the largest first.
        gap: nats within which the two count as tied.

    Returns:
        The position, None if the texts are equal.

    Raises:
        AssertionError: the texts diverge where these two tokens are no near-tie.
    """
    assert len(tops) == len(plain), (len(tops), len(plain))
    for position, (our_token, token, top) in enumerate(zip(ours, plain, tops, strict=False)):
        if our_token != token:
            (best, first), (next_best, second) = top[:2]
            assert {our_token, token} == {first, second}, f"token {position}: {our_token} for {token}, top two {top}"
            assert best - next_best < gap, f"token {position}: {our_token} for {token}, {best - next_best:.3f} apart"
            return position
    assert len(ours) == len(plain), f"{len(ours)} tokens for {len(plain)}"
    return None


def tops_of(answer: Answer) -> list[Top]:
    """Per new token, the log-probabilities and tokens that the request asked for."""
    return [[(value, token) for value, token, *_ in top] for top in answer.meta["output_top_logprobs"]]


def assert_diverging_only_at_near_ties(ours: Sequence[Answer], plain: Sequence[Answer]) -> None:
    """Every text is plain decoding's, up to a near-tie if it diverges there; at most ``SHARE`` of them do.

    Args:
        plain: generated with ``return_logprob`` and ``top_logprobs_num`` of two or more.
    """
    diverged = [
        divergence(ours_answer.tokens, answer.tokens, tops_of(answer), BF16_GAP) is not None
        for ours_answer, answer in zip(ours, plain, strict=True)
    ]
    print(f"{sum(diverged)} of {len(diverged)} texts diverge at a near-tie")
    assert sum(diverged) <= SHARE * len(diverged), f"{sum(diverged)} of {len(diverged)} texts diverge"


def largest_change(ours: Sequence[Answer], plain: Sequence[Answer]) -> float:
    """How far, at most, the gap of plain decoding's two most likely tokens moves from plain decoding to ours, in nats.

    Over every token up to the first that differs. A wrong state or a wrong key moves gaps long before it changes a
    token; rounding moves them by a few steps of a logit.

    Args:
        ours, plain: generated with ``return_logprob`` and the same ``top_logprobs_num`` of four or so. A token that one
            side does not report counts as infinitely far.
    """
    changes = [0.0]
    for ours_answer, answer in zip(ours, plain, strict=True):
        pairs = zip(ours_answer.tokens, answer.tokens, tops_of(ours_answer), tops_of(answer), strict=False)
        for our_token, token, our_top, top in pairs:
            (best, first), (next_best, second) = top[:2]
            values = {candidate: value for value, candidate in our_top}
            gap = values.get(first, math.inf) - values.get(second, -math.inf)
            changes.append(abs(best - next_best - gap))
            if our_token != token:
                break
    return max(changes)
