"""Our sampling filters and block penalties against SGLang's own functions for plain decoding."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch

from sglang_dflash.ops.reference.sampling import filter_probs

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
