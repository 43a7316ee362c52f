"""The sampler with SGLang's own classes: parameters over a block's rows, a seed for every request."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.features.seeds import Seeds
from sglang_dflash.worker.accept import for_block

pytestmark = pytest.mark.sglang


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


def batch_of(
    params: SamplingBatchInfo, seeds: Sequence[int | None], rows: Sequence[int], decode: int = 0
) -> SimpleNamespace:
    """A batch of a request for each seed, at the pool's ``rows``; the last ``decode`` ones decode."""
    reqs = [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]
    decoding = reqs[len(reqs) - decode :]
    rows = torch.tensor(rows, dtype=torch.int32)
    return SimpleNamespace(reqs=reqs, decoding_reqs=decoding, req_pool_indices=rows, sampling_info=params)


def new_seeds(random_seed: int = 1) -> Seeds:
    pool: Any = SimpleNamespace(req_to_token=torch.zeros(6, 3), device="cpu")
    return Seeds(pool, random_seed)


def test_a_request_keeps_its_seed_and_one_without_draws_by_a_random_one() -> None:
    params = info(3, sampling_seed=None)
    ranks = [new_seeds(), new_seeds()]
    for seeds in ranks:
        seeds.start(batch_of(params, [None, -5, None], rows=[4, 1, 2]))
        seeds.attach(batch_of(params, [None, -5, None], rows=[4, 1, 2]))
    drawn = params.seeds.tolist()
    assert drawn[1] == -5 and len(set(drawn)) == 3 and min(drawn[0], drawn[2]) > 1 << 32
    assert torch.equal(*(seeds._slots for seeds in ranks))
    assert not torch.equal(ranks[0]._slots, started(new_seeds(2), params, [4, 1, 2]))

    # In a mixed batch two decode; the first is new in a row that another request had.
    ranks[0].start(batch_of(params, [None, None, -5], rows=[2, 4, 1], decode=2))
    ranks[0].attach(batch_of(params, [None, None, -5], rows=[2, 4, 1]))
    again = params.seeds.tolist()
    assert again[1:] == [drawn[0], -5] and again[0] != drawn[2]
    assert for_block(params, 2).seeds.tolist() == [seed for seed in again for _ in range(2)]


def started(seeds: Seeds, params: SamplingBatchInfo, rows: Sequence[int]) -> torch.Tensor:
    seeds.start(batch_of(params, [None] * len(rows), rows))
    return seeds._slots
