"""The sampler with SGLang's own classes: parameters over a block's rows, a seed for every request."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.features.seeds import SeededSampler, Seeds
from sglang_dflash.ops import seeded_tokens
from sglang_dflash.worker.accept import for_block

pytestmark = pytest.mark.sglang

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


@pytest.mark.parametrize(
    "greedy, sglangs", [(True, None), (False, torch.tensor([7, 42]))], ids=["no draw", "deterministic mode"]
)
def test_rows_that_sglang_draws_itself_are_not_marked(greedy: bool, sglangs: torch.Tensor | None) -> None:
    params = info(2, is_all_greedy=greedy, sampling_seed=sglangs)
    params.seeds = "of the step before"
    new_seeds().attach(batch_of(params, [7, None], rows=[1, 2]))
    assert params.seeds is None


def test_the_drafter_reads_how_the_target_draws_once_per_change_of_the_batch() -> None:
    seeds, greedy = new_seeds(), info(2, is_all_greedy=True)
    batch = batch_of(info(2, sampling_seed=None), [7, -5], rows=[4, 1])
    seeds.start(batch)
    memory = [each.data_ptr() for each in seeds.noise]
    tokens = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling"), False)  # hashed in deterministic mode
    deterministic = {"sampling_seed": torch.tensor([8, 9]), **tokens}
    for changes, expected in (({"sampling_seed": None}, [7, -5]), (deterministic, [8, 9])):
        batch.req_pool_indices, batch.sampling_info = batch.req_pool_indices.clone(), info(2, **changes)
        seeds.publish_noise(batch)
        params = batch.sampling_info
        given = torch.tensor(expected), params.temperatures.view(-1), params.top_ks, params.top_ps, params.min_ps
        for shared, value in zip(seeds.noise, given, strict=True):
            assert torch.equal(shared[:2], value.to(shared.dtype))
        seeds.attach(batch)
        assert params.sampling_seed is not None or params.seeds.data_ptr() == memory[0], "a launch for the same seeds"
    batch.sampling_info = info(2, sampling_seed=torch.tensor([1, 2]))
    seeds.publish_noise(batch)
    assert seeds.noise.seeds[:2].tolist() == [8, 9] and (seeds.noise.top_ks[:2] != 1).any()
    seeds.publish_noise(batch_of(batch.sampling_info, [None, None], rows=[4, 1]))  # hashes ranks
    assert (seeds.noise.top_ks == 1).all()
    seeds.publish_noise(batch_of(greedy, [None, None], rows=[2, 3]))
    assert (seeds.noise.top_ks == 1).all() and memory == [each.data_ptr() for each in seeds.noise]
    seeds.noise.top_ks[0] = 9
    seeds.publish_noise(batch_of(greedy, [None], rows=[5]))
    assert seeds.noise.top_ks[0] == 9, "a copy for one greedy batch after another"


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> SeededSampler:
    """Outside a server SGLang's constructor finds no parallel state and no backend; a draw needs the backend."""
    kernel = SimpleNamespace(sampling_backend="pytorch")
    monkeypatch.setattr(sglang_sampler, "get_exec", lambda: SimpleNamespace(kernel=kernel))
    sampler = SeededSampler.__new__(SeededSampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target, sampler.use_ascend_backend = None, False
    sampler.use_log_softmax_logprob = sampler.enable_deterministic = False
    sampler.output_logprob_processor = OutputLogprobProcessor()
    return sampler


@pytest.mark.parametrize("filtered", [True, False])
def test_every_row_is_drawn_by_its_seed_with_log_probabilities_or_without(
    sampler: SeededSampler, filtered: bool
) -> None:
    torch.manual_seed(0)
    rows = 200
    logits, seeds, positions = torch.randn(rows, 80) * 3, torch.arange(rows), torch.full((rows,), 17)
    unfiltered = torch.ones(rows), torch.full((rows,), TOP_K_ALL), torch.zeros(rows)
    top_ps, top_ks, min_ps = unfiltered if not filtered else (unfiltered[0], torch.full((rows,), 5), unfiltered[2])
    needs = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), filtered)
    params = info(rows, sampling_seed=None, top_ps=top_ps, top_ks=top_ks, min_ps=min_ps, **needs)
    params.seeds = seeds
    filters = (top_ks, top_ps, min_ps) if filtered else None
    expected = seeded_tokens(logits, params.temperatures, filters, seeds, positions)
    for logprobs in (False, True):
        output = LogitsProcessorOutput(next_token_logits=logits.clone())
        tokens = sampler(output, params, logprobs, [0] * rows, [None] * rows, positions).long()
        assert torch.equal(tokens, expected)
    own = torch.log_softmax(logits / params.temperatures, -1).gather(1, expected[:, None])[:, 0]
    torch.testing.assert_close(output.next_token_logprobs, own)
