"""The tables of ``measure.bfloat16_table``: first differences, and how undecided the target is there."""

from __future__ import annotations

import math

import pytest
import torch

from measure.bfloat16 import Text
from measure.bfloat16_table import accept_length, compare, first_difference, step_at

TOPS = [[(7, 20.0), (1, 12.0)], [(8, 9.0), (5, 8.96875)], [(9, 20.0), (4, 19.0)]]
PLAIN = {"held-out 0": Text("held-out 0", [7, 8, 9], TOPS)}


@pytest.mark.parametrize(
    ("tokens", "position"), [([7, 8, 9], None), ([7, 5, 9], 1), ([7, 8], 2), ([7, 8, 9, 1], 3), ([], 0)]
)
def test_first_difference(tokens: list[int], position: int | None) -> None:
    assert first_difference([7, 8, 9], tokens) == position


@pytest.mark.parametrize("logit", [1.0, 1.99, 2.0, 9.0, 16.0, 31.5, -20.0])
def test_a_step_leads_to_the_next_bfloat16_number(logit: float) -> None:
    here = torch.tensor(abs(logit)).bfloat16()
    following = (here.view(torch.int16) + 1).view(torch.bfloat16)
    assert step_at(logit) == (following - here).item()


def test_a_text_is_compared_up_to_its_first_difference() -> None:
    arm_tops = [TOPS[0], [(5, 9.0), (8, 8.9375)], [(1, 3.0), (2, 0.0)]]
    arm = {"held-out 0": Text("held-out 0", [7, 5, 1], arm_tops), "random 0": Text("random 0", [1], [TOPS[0]])}
    found = compare(PLAIN, arm, PLAIN, PLAIN, "held-out")
    assert (found.texts, found.tokens) == (1, 2)
    (difference,) = found.differences
    assert difference.position == 1 and difference.step == 0.0625
    assert (difference.decode, difference.arm, difference.float32) == (0.03125, -0.0625, 0.03125)
    assert difference.steps == 0.5
    # The gap moved from 0.03125 to -0.0625.
    assert found.changes == [0, 1.5]


def test_an_equal_text_has_no_difference() -> None:
    found = compare(PLAIN, PLAIN, PLAIN, PLAIN, "held-out")
    assert found.differences == [] and found.tokens == 3


def test_accept_length_is_over_all_blocks() -> None:
    texts = {
        name: Text(name, [1] * tokens, [], blocks) for name, tokens, blocks in (("random 0", 13, 4), ("random 1", 5, 1))
    }
    assert accept_length(texts, "random") == 16 / 5
    assert math.isnan(accept_length(texts, "held-out"))
