"""The stored accept lengths are complete, and the gate on them names what moved; servers are held to them in
``test_dflash_equality.py``."""

from __future__ import annotations

import pytest

from sglang_dflash_lab.pairs import NAMES, drafter_kinds
from tests.support.acceptance import PROMPTS, WIDTHS, Counts, accept_length, assert_as_stored, stored
from tests.support.generation import Answer

CELLS = [(pair, kind, width) for pair in NAMES for kind in drafter_kinds(pair) for width in WIDTHS]


def answers(counts: list[Counts]) -> list[Answer]:
    return [Answer([], {"spec_verify_ct": steps, "spec_num_correct_drafts": drafts}) for steps, drafts in counts]


def test_every_drafter_has_figures_at_every_width() -> None:
    for cell in CELLS:
        kept = [counts for counts in stored(*cell) if counts]
        assert len(stored(*cell)) == PROMPTS and len(kept) > PROMPTS / 2, cell
        assert 1 < accept_length(kept) <= cell[2], cell


def test_one_step_more_fails_and_is_named() -> None:
    cell = ("tiny-hybrid", "good", 16)
    counts = [each or (1, 0) for each in stored(*cell)]
    assert_as_stored(answers(counts), *cell)
    steps, drafts = counts[3]
    with pytest.raises(AssertionError, match=rf"1 of \d+ prompts moved, prompt 3: \({steps + 1}, {drafts}\) for"):
        assert_as_stored(answers([*counts[:3], (steps + 1, drafts), *counts[4:]]), *cell)


def test_a_choice_too_close_to_store_is_not_compared() -> None:
    cell = next(cell for cell in CELLS if None in stored(*cell))
    assert_as_stored(answers([each or (99, 0) for each in stored(*cell)]), *cell)
