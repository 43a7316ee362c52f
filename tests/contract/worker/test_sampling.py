"""The sampler's parts, with SGLang's own classes: parameters over a block's rows, seeds whatever the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo

from sglang_dflash.worker.sampling.sampler import for_block
from sglang_dflash.worker.sampling.seeded import SeededSampler

TOP_K_ALL = 1 << 30


def info(bs: int, **changes: Any) -> SamplingBatchInfo:
    """Parameters of ``bs`` unlike requests."""
    values: dict[str, Any] = {
        "temperatures": torch.arange(1.0, bs + 1)[:, None],
        "top_ps": torch.linspace(0.5, 1.0, bs),
        "top_ks": torch.arange(3, bs + 3, dtype=torch.int32),
        "min_ps": torch.linspace(0.0, 0.1, bs),
        "sampling_seed": torch.arange(bs),
        "is_all_greedy": False,
        "is_any_greedy": False,
        "need_top_p_sampling": True,
        "need_top_k_sampling": True,
        "need_min_p_sampling": True,
        "vocab_size": 12,
        "device": "cpu",
    }
    return SamplingBatchInfo(**{**values, **changes})


def test_every_row_of_a_block_has_its_requests_parameters() -> None:
    bs, width = 3, 4
    before = info(bs)
    after = for_block(before, width)
    for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed"):
        for row in range(bs * width):
            assert torch.equal(getattr(after, name)[row], getattr(before, name)[row // width]), name
    assert len(after) == bs * width and len(before) == bs


def test_a_processor_is_called_with_every_row_of_its_requests() -> None:
    entry = ProcessorEntry(DisallowedTokensLogitsProcessor(), rows=[0, 2], indices=torch.tensor([0, 2]))
    before = info(3, has_custom_logit_processor=True, custom_logit_processor={7: entry}, custom_params=[{}, None, {}])
    found = for_block(before, 2).custom_logit_processor[7]
    assert found.rows == found.indices.tolist() == [0, 1, 4, 5]
    assert entry.rows == [0, 2]


@pytest.fixture
def sampler() -> SeededSampler:
    """Outside a server SGLang's constructor finds no parallel state; the draw needs none."""
    sampler = SeededSampler.__new__(SeededSampler)
    torch.nn.Module.__init__(sampler)
    sampler.enable_deterministic = False
    return sampler


def draw(sampler: SeededSampler, probs: torch.Tensor, params: SamplingBatchInfo, *, simple: bool) -> torch.Tensor:
    positions = torch.full((len(probs),), 17)
    return sampler._sample_from_probs(probs.clone(), params, positions, simple)[0]


def test_a_seed_draws_the_same_beside_requests_that_filter(sampler: SeededSampler) -> None:
    torch.manual_seed(0)
    rows = 400
    probs = torch.softmax(torch.randn(rows, 300) * 4, dim=-1)
    seeds = torch.arange(rows)
    unfiltered = {"top_ps": torch.ones(rows), "top_ks": torch.full((rows,), TOP_K_ALL), "min_ps": torch.zeros(rows)}
    alone = draw(sampler, probs, info(rows, sampling_seed=seeds, **unfiltered), simple=True)
    # A neighbour's top-p sends the whole batch through the filters.
    beside = draw(sampler, probs, info(rows, sampling_seed=seeds, **unfiltered), simple=False)
    assert torch.equal(alone, beside)
    assert len(set(alone.tolist())) > 10


def test_filters_bind_seeded_draws(sampler: SeededSampler) -> None:
    torch.manual_seed(0)
    rows = 300
    probs = torch.softmax(torch.randn(1, 50) * 2, dim=-1).expand(rows, -1)
    filters = {"top_ps": torch.ones(rows), "top_ks": torch.full((rows,), 3), "min_ps": torch.zeros(rows)}
    drawn = draw(sampler, probs, info(rows, sampling_seed=torch.arange(rows), **filters), simple=False)
    assert set(drawn.tolist()) == set(probs[0].topk(3).indices.tolist())
