"""A transferred request's history, and the counts of copies that reach the host.

Servers compare histories with the host's tokens at each step (the plugin's mode ``history``).
"""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.worker.copies import Copies
from sglang_dflash.worker.flight import StepRecord

pytestmark = pytest.mark.sglang

VOCABULARY = 1000


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def copies() -> Copies:
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 80, dtype=torch.int32))
    config = SimpleNamespace(context_len=64, vocab_size=VOCABULARY)
    runner: Any = SimpleNamespace(req_to_token_pool=pool, model_config=config, max_total_num_tokens=4096)
    return Copies(runner, width=4)


def test_a_request_that_another_server_prefilled_is_taken_up() -> None:
    held, rows = copies(), torch.tensor([3, 1])
    reqs = [Request(origin_input_ids=array("q", ids), output_ids=array("q", [9])) for ids in ([4, 5, 6], [7, 2**62])]
    lens = torch.tensor([3, 2])
    batch: Any = SimpleNamespace(
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        reqs=reqs,
        seq_lens=lens,
        seq_lens_cpu=lens,
        spec_info=SimpleNamespace(bonus_tokens=torch.tensor([9, 8])),
    )
    held.transferred(batch)
    assert held.history[3, :4].tolist() == [4, 5, 6, 9] and held.history[1, :3].tolist() == [7, -1, 8]


def test_matches_and_tokens_of_copies_reach_the_host() -> None:
    held, reqs = copies(), (Request(), Request(), Request())
    rows, at = [2, 0, 3], 70 << 36  # of four rows; at position 70
    found = torch.tensor([[at + (3 << 31), 0], [0, 0], [at + (9 << 31) + 5, 0], [at + (4 << 31), 0]])
    held.read(StepRecord(1, 3, reqs, found=found, rows=rows, accept_lens=[1, 1, 1]))
    assert held.buckets([*reqs, Request()]) == [2, 0, 1, 0]
    # Copies differ from drafts from positions 2 and 3 on; the first one was right up to position 5.
    found = torch.tensor([[at + (16 << 31), 0], [0, 0], [at, 2], [at, 3]])
    step = StepRecord(16, 3, reqs, found=found, rows=rows, accept_lens=[6, 4, 2])
    held.read(step)
    assert (step.match_lens, step.copied_tokens) == ([9, 4], 4)
    assert held.buckets(reqs) == [0, 4, 0]
