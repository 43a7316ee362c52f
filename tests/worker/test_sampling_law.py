"""Our sampling filters and block penalties against SGLang's own functions for plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

from sglang_dflash.ops import accept_block
from sglang_dflash.ops.reference.sampling import filter_probs
from sglang_dflash.worker.accept import simulate
from sglang_dflash_lab.train.sampling import Rejection
from tests.support.probability import p_value

pytestmark = pytest.mark.sglang


@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_filters_keep_what_sglangs_pytorch_sampler_keeps(temperature: float) -> None:
    torch.manual_seed(0)
    rows, vocab = 60, 200
    logits = torch.randn(rows, vocab) * 3
    logits[:20] = logits[:20].round()  # many equal probabilities, so that ties cross the boundaries
    probs = torch.softmax(logits / temperature, dim=-1)
    top_ks = torch.tensor([1, 3, 40, 1 << 30]).repeat(15)
    top_ps = torch.tensor([0.3, 0.9, 0.999]).repeat(20)
    min_ps = torch.tensor([0.0, 0.05, 0.4, 0.0, 0.9]).repeat(12)
    _, ranked, order, _ = top_k_top_p_min_p_sampling_from_probs_torch(
        probs.clone(), top_ks, top_ps, min_ps, True, None, torch.zeros(rows), return_filtered_probs=True
    )
    expected = torch.zeros_like(probs).scatter_(1, order.long(), ranked)
    assert torch.equal(filter_probs(probs, top_ks, top_ps, min_ps), expected)


def test_simulated_rejection_sampling_keeps_the_targets_law() -> None:
    """That of docs/internals/exact.md."""
    way, scores, candidates, drawn = Rejection(5, 0.8, 0.8), np.linspace(0, 2, 12), np.array([3, 7, 1, 9, 4]), []
    for _ in range(20_000):
        way.draft(candidates / 4, candidates, 7)
        drawn.append(way.draw(scores, np.arange(12), 7))
    weights = torch.from_numpy(way.weights(scores))
    assert p_value(torch.tensor(drawn).bincount(minlength=12), weights / weights.sum()) > 1e-3


@pytest.mark.parametrize(("room", "committed"), [(None, 8), (3, 3), (1, 1)])
def test_simulated_accept_lengths_end_at_the_last_slot(room: int | None, committed: int) -> None:
    drafts, targets = torch.arange(1, 17).view(2, 8), torch.zeros(2, 8, dtype=torch.int64)
    drafts[:, room:] = drafts[:, room:] if room is None else -1
    simulate(drafts, targets, 8.0, room)
    accepted = accept_block(drafts, targets, torch.tensor([5, 9]))
    assert accepted.accept_lens.tolist() == [committed] * 2
