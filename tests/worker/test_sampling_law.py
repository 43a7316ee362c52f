"""Our sampling filters and block penalties against SGLang's own functions for plain decoding."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.sampler import top_k_top_p_min_p_sampling_from_probs_torch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)

from sglang_dflash.ops import filter_probs, penalize_block

pytestmark = pytest.mark.sglang


@dataclass(eq=False)
class Batch:
    """What SGLang's penalizers read of a batch; they hold it by weak reference."""

    reqs: list[SimpleNamespace]
    device: str = "cpu"


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


def batch_of(coefficients: torch.Tensor) -> Batch:
    """One request per row: frequency, presence and repetition penalty."""
    names = ("frequency_penalty", "presence_penalty", "repetition_penalty")
    requests = [
        SimpleNamespace(sampling_params=SimpleNamespace(**dict(zip(names, row.tolist(), strict=True))))
        for row in coefficients
    ]
    return Batch(requests)


def penalizers_of(batch: Batch, vocab: int) -> BatchedPenalizerOrchestrator:
    kinds = {BatchedFrequencyPenalizer, BatchedPresencePenalizer, BatchedRepetitionPenalizer}
    return BatchedPenalizerOrchestrator(vocab, batch, kinds)


def test_block_penalties_equal_sglangs_penalizers_fed_one_token_at_a_time() -> None:
    torch.manual_seed(0)
    bs, width, vocab = 4, 6, 12
    coefficients = torch.tensor([[0.0, 0.0, 1.0], [0.5, 0.0, 1.0], [0.0, -0.7, 1.2], [0.3, 0.4, 0.7]])
    batch = batch_of(coefficients)
    orchestrator = penalizers_of(batch, vocab)
    generated = torch.randint(0, vocab, (bs, 5))
    for token in generated[:, :-1].unbind(1):
        orchestrator.cumulate_output_tokens(token)

    draft = torch.cat((generated[:, -1:], torch.randint(0, 4, (bs, width - 1))), dim=1)
    logits = torch.randn(bs, width, vocab) * 3
    expected = logits.clone()
    for j in range(width):
        orchestrator.cumulate_output_tokens(draft[:, j])
        additive = torch.zeros(bs, vocab)
        orchestrator.accumulate_additive_penalties(additive)
        expected[:, j] += additive
        scaling = orchestrator.accumulate_scaling_penalties()
        expected[:, j] = torch.where(expected[:, j] < 0, expected[:, j] * scaling, expected[:, j] / scaling)

    counts = torch.nn.functional.one_hot(generated, vocab).sum(dim=1).int()
    penalize_block(logits, draft, counts, torch.arange(bs), coefficients)
    torch.testing.assert_close(logits, expected)
