"""A block of which only some positions are verified."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.ops import accept_block, confident_lens
from sglang_dflash.worker.accept import NOT_CHOSEN
from sglang_dflash.worker.cut import cut
from sglang_dflash.worker.step import NOT_VERIFIED, Step


def step(**batch: Any) -> Step:
    """Two requests, four positions each; their drafts are 11, 12, 13 and 21, 22, 23."""
    sampling = SimpleNamespace(has_custom_logit_processor=False, acc_additive_penalties=None, logit_bias=None)
    wanted = {"has_grammar": False, "return_logprob": False, "sampling_info": sampling} | batch
    block: Any = Step(
        SimpleNamespace(**wanted),
        state=None,
        width=4,
        grammar_barrier=None,
        positions=torch.tensor([5, 6, 7, 8, 30, 31, 32, 33]),
        tokens=torch.tensor([[10, 11, 12, 13], [20, 21, 22, 23]]),
        target_kv=None,
        draft_kv=None,
    )
    block.confidence = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.9, 0.9]])
    return block


def test_the_confident_drafts_of_each_request_are_left() -> None:
    block = step()
    cut(block, 0.6)
    assert (block.width, block.verify_lens) == (3, [3, 1])
    assert block.tokens.tolist() == [[10, 11, 12], [20, NOT_VERIFIED, NOT_VERIFIED]]
    assert block.positions.tolist() == [5, 6, 7, 30, 31, 32]
    assert block.of_verified(block.positions).tolist() == [5, 6, 7, 30]
    assert block.laid_out is not None and block.laid_out.tolist() == [0, 1, 2, 4]


def test_a_cut_of_equal_lengths_leaves_a_narrower_block() -> None:
    block = step()
    cut(block, 0.99)
    assert (block.width, block.verify_lens, block.rows) == (1, [1, 1], None)
    assert block.tokens.tolist() == [[10], [20]]
    assert block.laid_out is not None and block.laid_out.tolist() == [0, 4]


@pytest.mark.parametrize(
    "batch",
    [
        {"has_grammar": True},
        {"return_logprob": True},
        {"sampling_info": SimpleNamespace(has_custom_logit_processor=False, acc_additive_penalties=1, logit_bias=None)},
    ],
)
def test_what_walks_a_block_gets_the_whole_block(batch: dict[str, Any]) -> None:
    block = step(**batch)
    cut(block, 0.6)
    assert (block.width, block.verify_lens, block.rows) == (4, None, None)


@pytest.mark.parametrize(("least", "width"), [(4, 3), (5, 4), (float("inf"), 4)])
def test_a_cut_that_leaves_too_little_out_is_not_made(least: float, width: int) -> None:
    block = step()  # of 8 positions, 0.6 would leave out 4
    cut(block, 0.6, least)
    assert block.width == width


def test_without_a_threshold_nothing_is_cut() -> None:
    block = step()
    cut(block, 0.0)
    assert block.verify_lens is None


def test_a_draft_that_was_cut_is_not_accepted_even_if_it_was_right() -> None:
    """The target chose 21 after the second request's anchor: that is its bonus token, not an accepted draft."""
    block = step()
    cut(block, 0.6)
    target = torch.tensor([[11, 12, 99], [21, NOT_CHOSEN, NOT_CHOSEN]])
    accepted = accept_block(block.tokens, target, torch.tensor([5, 30]))
    assert accepted.accept_lens.tolist() == [3, 1]
    assert accepted.bonus.tolist() == [99, 21]


def test_a_position_after_a_hopeless_one_is_hopeless() -> None:
    assert confident_lens(torch.tensor([[0.1, 1.0], [1.0, 1.0], [0.7, 0.7]]), 0.5).tolist() == [1, 3, 2]
