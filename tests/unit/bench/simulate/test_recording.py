"""What is read out of the steps of a log."""

from __future__ import annotations

import pytest

from sglang_dflash.bench.simulate.recording import Answer, answers, check_widths
from sglang_dflash.bench.step_log import Decode, Prefill
from sglang_dflash.errors import DFlashError


def decode(width: int, accept: tuple[int, ...], verify: tuple[int, ...] | None = None) -> Decode:
    rids = tuple("abc"[: len(accept)])
    return Decode(0.0, rids, width, verify or (width,) * len(accept), accept, 10, 1.0)


def test_each_token_has_the_distance_at_which_it_was_drafted():
    """a: two drafts stand, the third is rejected; b: the whole block stands, and its bonus token was no draft."""
    found = answers([Prefill(0.0, ("a", "b"), 30, 5.0), decode(4, (3, 4)), decode(1, (1, 1))])
    a, b = found.values()
    assert (a.prompt, b.prompt) == (15, 15)
    assert a.distance == [1, 2, 3, 0]
    assert a.accepted == [True, True, False, False]
    assert b.distance == [1, 2, 3, 0, 0]
    assert b.accepted == [True, True, True, False, False]


def test_a_cut_block_says_nothing_behind_the_cut():
    (a,) = answers([Prefill(0.0, ("a",), 30, 5.0), decode(8, (2,), (2,)), decode(8, (2,), (3,))]).values()
    assert a.distance == [1, 0, 1, 2]
    assert a.accepted == [True, False, True, False]


def test_a_chunked_prompt_is_one_prompt():
    (a,) = answers([Prefill(0.0, ("a",), 30, 5.0), Prefill(0.1, ("a",), 12, 5.0)]).values()
    assert a.prompt == 42


def test_requests_that_were_running_before_the_log_are_left_out():
    assert answers([decode(4, (3,))]) == {}


def test_an_answer_ends_where_the_client_saw_its_end():
    answer = Answer("a")
    for accept in (3, 4, 2):
        answer.add(accept, 4)
    # Tokens 1 to 5 are the answer's: the second step ended it, the third was launched before that was known
    assert answer.cut(5) == 1
    assert answer.distance == [1, 2, 3, 1, 2]


def test_an_answer_that_is_longer_than_its_log_is_named():
    answer = Answer("a")
    answer.add(3, 4)
    with pytest.raises(DFlashError, match="3 logged tokens of request a, which has 4"):
        answer.cut(4)


def test_widths_that_were_not_drawn_evenly_are_told():
    even = [decode(width, (1,)) for width in (1, 4, 16) for _ in range(10)]
    assert check_widths(even) == []
    (warning,) = check_widths([*even, *[decode(16, (1,)) for _ in range(60)]])
    assert "widths [1, 4] are rare" in warning
