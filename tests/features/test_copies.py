"""The counts of copies that reach the host, and which of two texts is drafted next.

Servers compare histories with the host's tokens at each step (the plugin's mode ``history``).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.features import figures
from sglang_dflash.features.copies import Copies
from sglang_dflash.ops.reference.step import OTHER, SETTLED, offers_of
from sglang_dflash.step.flight import Finished

pytestmark = pytest.mark.sglang

VOCABULARY = 1000


class Request(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Copies:
    monkeypatch.setattr(figures, "get_observability", lambda: SimpleNamespace(enable_metrics=False))
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 80, dtype=torch.int32))
    config = SimpleNamespace(context_len=64, vocab_size=VOCABULARY)
    runner: Any = SimpleNamespace(req_to_token_pool=pool, model_config=config, max_total_num_tokens=4096)
    return Copies(runner, 4, figures.Figures(16))


def test_matches_and_tokens_of_copies_reach_the_host(held: Copies) -> None:
    reqs = (Request(), Request(), Request())
    rows, at = [2, 0, 3], 70 << 36  # of four rows; at position 70
    found = torch.zeros(4, 4, dtype=torch.int64)
    found[:, 0] = torch.tensor([at + (3 << 31), 0, at + (9 << 31) + 5, at + (4 << 31)])
    held.read(Finished(1, reqs, (), [1, 1, 1]), (rows, found))
    assert held.buckets([*reqs, Request()]) == [2, 0, 1, 0]
    # Copies differ from drafts from positions 2 and 3 on; the first one was right up to position 5.
    found = torch.zeros(4, 4, dtype=torch.int64)
    found[:, 0] = torch.tensor([at + (16 << 31), 0, at, at])
    for row, place in ((2, 2), (3, 3)):
        offers_of(found)[row, :OTHER] = torch.tensor([place, 1, 0])
    held.read(Finished(16, reqs, (), [6, 4, 2]), (rows, found))
    info = held._figures.info()
    assert (info["copied_blocks_by_match_length"], info["copied_tokens"]) == ({"4": 1, "9": 1}, 4)
    assert held.buckets(reqs) == [0, 4, 0]


def decisions(held: Copies, offered: tuple[int, int, bool], cell: int, accept_len: int, steps: int) -> list[bool]:
    """Whether the copy is taken in the offered cell after each of ``steps`` alike, on the device."""
    taken = []
    for _ in range(steps):
        found, (place, is_taken, other_was_right) = torch.zeros(1, 4, dtype=torch.int64), offered
        offers_of(found)[0, : SETTLED + 1] = torch.tensor([place, is_taken, cell, 0, other_was_right])
        held.read(Finished(16, (Request(),), (), [accept_len]), ([0], found))
        taken.append(bool(held._choices[cell]))
    return taken


@pytest.mark.parametrize(
    ("offered", "accept_len", "copy_was_right"),
    [
        ((3, 1, False), 4, True),
        ((3, 1, True), 3, False),
        ((3, 0, False), 4, False),
        ((3, 0, True), 3, True),
        ((3, 1, False), 3, None),  # neither was
        ((3, 0, True), 2, None),  # a token before them was refused
    ],
)
@pytest.mark.parametrize("edges", [0, 6])  # the drafter is unsure, or sure
def test_what_was_right_is_offered_next(
    held: Copies, offered: tuple[int, int, bool], accept_len: int, copy_was_right: bool | None, edges: int
) -> None:
    at_first = edges == 0
    found = decisions(held, offered, edges, accept_len, 40)
    assert found[0] is at_first  # one result changes nothing
    assert found[-1] is (at_first if copy_was_right is None else copy_was_right)
    others = [bool(choice) is (cell % 7 <= 3) for cell, choice in enumerate(held._choices[:28]) if cell != edges]
    assert all(others) and held._choices[28:].all()


def test_an_update_of_weights_forgets_what_was_right(held: Copies) -> None:
    before = held._choices.clone()
    assert not decisions(held, (3, 1, True), 0, 3, 40)[-1]
    held.forget("target", None)
    assert held._choices.equal(before) and held.evidence.results == 0
