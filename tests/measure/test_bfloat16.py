"""First differences in bfloat16, and how undecided the target is there."""

from __future__ import annotations

from sglang_dflash_lab.measure.bfloat16 import Text, accept_length, compare, first_difference, step_at

TOPS = [[(7, 20.0), (1, 12.0)], [(8, 9.0), (5, 8.96875)], [(9, 20.0), (4, 19.0)]]
PLAIN = {"held-out 0": Text("held-out 0", [7, 8, 9], TOPS)}


def test_a_text_is_compared_up_to_its_first_difference() -> None:
    arm_tops = [TOPS[0], [(5, 9.0), (8, 8.9375)], [(1, 3.0), (2, 0.0)]]
    arm = {"held-out 0": Text("held-out 0", [7, 5, 1], arm_tops, blocks=2)}
    found = compare(PLAIN, arm, PLAIN, "held-out")
    assert (found.texts, found.tokens) == (1, 2)
    assert found.gaps == [(0.03125, 0.5)] and step_at(9.0) == 0.0625
    assert found.moved == [1.5] and found.changes == [0, 1.5]  # the gap moved from 0.03125 to -0.0625
    assert first_difference([7, 8, 9], [7, 8]) == 2 and accept_length(arm, "held-out") == 1
    assert compare(PLAIN, PLAIN, PLAIN, "held-out").gaps == []
