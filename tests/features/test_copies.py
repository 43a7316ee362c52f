"""The counts of copies that reach the host.

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
    found = torch.zeros(4, 2, dtype=torch.int64)
    found[:, 0] = torch.tensor([at + (3 << 31), 0, at + (9 << 31) + 5, at + (4 << 31)])
    found[:, 1] = 1  # of an earlier step: one of width 1 copies nothing
    held.read(Finished(1, reqs, (), [1, 1, 1]), (rows, found))
    assert held.buckets([*reqs, Request()]) == [2, 0, 1, 0]
    # Copies begin at positions 2 and 3; the first one was right up to position 5.
    found = torch.zeros(4, 2, dtype=torch.int64)
    found[:, 0] = torch.tensor([at + (16 << 31), 0, at, at])
    found[2:, 1] = torch.tensor([2, 3])
    held.read(Finished(16, reqs, (), [6, 4, 2]), (rows, found))
    info = held._figures.info()
    assert (info["copied_blocks_by_match_length"], info["copied_tokens"]) == ({"4": 1, "9": 1}, 4)
    assert held.buckets(reqs) == [0, 4, 0]
