"""The model of how far a token can be drafted."""

from __future__ import annotations

from random import Random

import pytest

from sglang_dflash.bench.simulate.reach import acceptance, accepted_from, difficulties
from sglang_dflash.bench.simulate.recording import Answer

H = [1.0, 0.9, 0.6, 0.6]


def answer(*steps: tuple[int, int]) -> Answer:
    made = Answer("a")
    for accept, verify in steps:
        made.add(accept, verify)
    return made


def test_acceptance_is_the_share_of_drafts_that_stood():
    # Distance 1: three of four stand; 2: two of three; 3: one of two
    counted = [answer((4, 4)), answer((3, 4)), answer((2, 4)), answer((1, 4))]
    assert acceptance(counted, 4) == pytest.approx([1, 3 / 4, 2 / 3, 1 / 2])


def test_acceptance_never_rises():
    # Distance 1: one of two stands; 2: all of one. Together two of three
    assert acceptance([answer((3, 3)), answer((1, 3))], 3) == pytest.approx([1, 2 / 3, 2 / 3])


def test_a_distance_that_was_never_drafted_is_like_the_one_before():
    assert acceptance([answer((2, 2)), answer((1, 2))], 4) == pytest.approx([1, 1 / 2, 1 / 2, 1 / 2])


@pytest.mark.parametrize("steps", [[(3, 4), (1, 1), (4, 4)], [(1, 4), (2, 4), (4, 4)]])
def test_a_replay_of_the_recorded_widths_accepts_what_was_accepted(steps: list[tuple[int, int]]):
    for seed in range(50):
        drawn = difficulties(answer(*steps), H, Random(seed))
        start = 0
        for accept, width in steps:
            assert accepted_from(drawn, start, width, H) == accept
            start += accept


def test_a_rejected_draft_may_stand_nearer_to_its_anchor():
    """Rejected at distance 2, where 0.6 stand; at distance 1 it would be 0.9, so 0.3 of the 0.4."""
    made = answer((2, 4))
    stands = [difficulties(made, H, Random(seed))[1] < H[1] for seed in range(4000)]
    assert sum(stands) / len(stands) == pytest.approx(0.75, abs=0.03)


def test_a_token_that_was_not_drafted_is_as_hard_as_its_answers_others():
    drawn = difficulties(answer((2, 4), (1, 1)), H, Random(0))
    assert set(drawn) == set(drawn[:2])
    assert len(drawn) == 3 + len(H)
