"""The judge of near-ties passes what rounding can do, and nothing else."""

from __future__ import annotations

import math

import pytest

from tests.support.generation import Answer
from tests.support.near_tie import assert_diverging_only_at_near_ties, divergence, largest_change

PLAIN = [7, 8, 9]
TOPS = [[(-0.1, 7), (-3.0, 1)], [(-0.7, 8), (-0.8, 5)], [(-0.2, 9), (-0.3, 4)]]


def test_equal_texts_do_not_diverge() -> None:
    assert divergence(PLAIN, PLAIN, TOPS, 0.5) is None


def test_texts_diverge_at_a_near_tie_and_are_not_compared_after_it() -> None:
    assert divergence([7, 5, 1000], PLAIN, TOPS, 0.5) == 1
    assert divergence([7, 5], PLAIN, TOPS, 0.5) == 1


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ([1, 8, 9], "2.900 apart"),  # the second choice, but the target is sure
        ([7, 6, 9], "top two"),  # a near-tie, but of another token
        ([7, 8, 1], "top two"),
        ([7, 8], "2 tokens for 3"),
    ],
)
def test_a_true_mismatch_is_refused(ours: list[int], reason: str) -> None:
    with pytest.raises(AssertionError, match=reason):
        divergence(ours, PLAIN, TOPS, 0.5)


def test_the_bound_decides() -> None:
    with pytest.raises(AssertionError, match="0.100 apart"):
        divergence([7, 5, 9], PLAIN, TOPS, 0.05)


def test_the_plain_text_must_be_the_targets_own() -> None:
    with pytest.raises(AssertionError, match="top two"):
        divergence([7, 8, 9], [7, 2, 9], TOPS, 0.5)


def answers(*texts: list[int]) -> list[Answer]:
    return [
        Answer(text, {"output_top_logprobs": [[[*entry, None] for entry in top] for top in TOPS]}) for text in texts
    ]


def test_few_texts_may_diverge() -> None:
    plain = answers(*[PLAIN] * 8)
    assert_diverging_only_at_near_ties(answers(*[PLAIN] * 6, [7, 5, 2], [7, 8, 4]), plain)
    with pytest.raises(AssertionError, match="3 of 8 texts diverge"):
        assert_diverging_only_at_near_ties(answers(*[PLAIN] * 5, *[[7, 5, 2]] * 3), plain)


def scored(tokens: list[int], *tops: list[list[float]]) -> Answer:
    return Answer(tokens, {"output_top_logprobs": [[[*entry, None] for entry in top] for top in tops]})


def test_the_largest_change_of_a_gap_is_found_in_texts_that_are_equal() -> None:
    plain = scored(PLAIN, *TOPS)
    assert largest_change([plain], [plain]) == 0
    moved = scored(PLAIN, TOPS[0], [[-0.9, 5], [-1.2, 8]], TOPS[2])  # 0.1 ahead in plain decoding, 0.3 behind here
    assert largest_change([plain, moved], [plain, plain]) == pytest.approx(0.4)


def test_gaps_are_compared_up_to_the_first_difference() -> None:
    plain = scored(PLAIN, *TOPS)
    diverging = scored([7, 5, 1], TOPS[0], [[-0.7, 5], [-0.8, 8]], [[-0.1, 1], [-9.0, 3]])
    assert largest_change([diverging], [plain]) == pytest.approx(0.2)


def test_a_token_that_is_not_reported_is_infinitely_far() -> None:
    plain = scored(PLAIN, *TOPS)
    assert largest_change([scored(PLAIN, TOPS[0], [[-0.1, 8], [-4.0, 3]], TOPS[2])], [plain]) == math.inf
    assert largest_change([scored(PLAIN, TOPS[0], [[-0.1, 2], [-4.0, 5]], TOPS[2])], [plain]) == math.inf
