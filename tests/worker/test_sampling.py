"""The sampler with SGLang's own classes: parameters over a block's rows, seeds in any batch."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

from sglang_dflash.worker.accept import for_block
from sglang_dflash.worker.sampling import seeded
from sglang_dflash.worker.sampling.seeded import SeededSampler, mark_seeded_rows
from sglang_dflash.worker.start.prewarm import sample

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


def requests(seeds: Iterable[int | None]) -> list[SimpleNamespace]:
    return [SimpleNamespace(sampling_params=SimpleNamespace(sampling_seed=seed)) for seed in seeds]


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("seeds", [[None, 7, None, -5], [7]])
def test_every_row_of_a_seeded_request_is_marked_and_seeds_are_dense(seeds: list[int | None], width: int) -> None:
    """The kernel reads seeds without a stride: others would draw with another number."""
    params = info(len(seeds), sampling_seed=None)
    mark_seeded_rows(params, requests(seeds))
    marked = for_block(params, width).seeded_rows
    expected = [(i * width + j, seed) for i, seed in enumerate(seeds) if seed is not None for j in range(width)]
    rows = range(width) if marked.rows is None else marked.rows.tolist()
    assert list(zip(rows, marked.seeds.tolist(), strict=True)) == expected
    assert (marked.rows is None) == (None not in seeds) and marked.seeds.stride() == (1,)


@pytest.mark.parametrize(
    "seeds, greedy, sglangs",
    [([None, None], False, None), ([7, None], True, None), ([7, None], False, torch.tensor([7, 42]))],
    ids=["no seed", "no draw", "deterministic mode"],
)
def test_rows_that_sglang_draws_itself_are_not_marked(
    seeds: list[int | None], greedy: bool, sglangs: torch.Tensor | None
) -> None:
    params = info(2, is_all_greedy=greedy, sampling_seed=sglangs)
    params.seeded_rows = "of the step before"
    mark_seeded_rows(params, requests(seeds))
    assert params.seeded_rows is None


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


def draw(
    sampler: SeededSampler,
    logits: torch.Tensor,
    params: SamplingBatchInfo,
    seeds: Iterable[int | None] = range(1 << 20),
    *,
    logprobs: bool = False,
) -> torch.Tensor:
    params.sampling_seed = None  # SGLang sets it in deterministic mode alone
    mark_seeded_rows(params, requests(itertools.islice(seeds, len(logits))))
    positions, output = torch.full((len(logits),), 17), LogitsProcessorOutput(next_token_logits=logits.clone())
    tokens: torch.Tensor = sampler(output, params, logprobs, [0] * len(logits), [None] * len(logits), positions)
    if logprobs:
        own = torch.log_softmax(logits / params.temperatures, -1).gather(1, tokens.long()[:, None])[:, 0]
        torch.testing.assert_close(output.next_token_logprobs, own)
    return tokens.long()


def unfiltered(rows: int) -> dict[str, torch.Tensor]:
    return {"top_ps": torch.ones(rows), "top_ks": torch.full((rows,), TOP_K_ALL), "min_ps": torch.zeros(rows)}


@pytest.mark.parametrize("simple", [True, False])
def test_only_seeded_rows_leave_sglangs_sampling(
    sampler: SeededSampler, simple: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rows, given = 200, 30
    logits = torch.randn(rows, 80) * 3
    params = {**unfiltered(rows), "top_ks": torch.full((rows,), 5)} if not simple else unfiltered(rows)
    needs = dict.fromkeys(("need_top_p_sampling", "need_top_k_sampling", "need_min_p_sampling"), not simple)
    seeds: list[int | None] = [None] * rows
    chosen = torch.randperm(rows)[:given].sort().values.tolist()
    for seed, row in enumerate(chosen):
        seeds[row] = seed

    seen, whole = list[tuple[int, bool]](), seeded.seeded_tokens

    def spy(logits: torch.Tensor, temperatures: Any, filters: Any, own: Any, *rest: Any) -> torch.Tensor:
        seen.append((len(own), filters is None))
        return whole(logits, temperatures, filters, own, *rest)

    monkeypatch.setattr(seeded, "seeded_tokens", spy)
    mixed = draw(sampler, logits, info(rows, **params, **needs), seeds)
    assert seen == [(given, simple)]

    for row in chosen:  # as alone in a batch, with log-probabilities or without
        own = {name: values[row : row + 1] for name, values in params.items()}
        one = {"temperatures": torch.tensor([[row + 1.0]]), **own, **needs}
        for logprobs in (False, True):
            alone = draw(sampler, logits[row : row + 1], info(1, **one), [seeds[row]], logprobs=logprobs)
            assert alone.item() == mixed[row]

    # SGLang draws new tokens for the others, within their filters.
    others = [row for row in range(rows) if seeds[row] is None]
    again = draw(sampler, logits, info(rows, **params, **needs), seeds)
    assert torch.equal(again[chosen], mixed[chosen]) and not torch.equal(again[others], mixed[others])
    if not simple:
        assert all(mixed[row] in logits[row].topk(5).indices for row in range(rows))


@pytest.mark.parametrize("with_seed", [True, False])
def test_the_prewarm_step_samples_every_row_through_the_servers_sampler(
    with_seed: bool, sampler: SeededSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[int]()
    monkeypatch.setattr(seeded, "seeded_tokens", lambda logits, *_: drawn.append(len(logits)) or logits.argmax(-1))
    answered = list[torch.Tensor]()

    def spy(*call: Any) -> torch.Tensor:
        answered.append(sampler(*call))
        return answered[-1]

    runner: Any = SimpleNamespace(device="cpu", model_config=SimpleNamespace(vocab_size=50), sampler=spy)
    sample(runner, 6, seeded=with_seed)
    assert [len(tokens) for tokens in answered] == [6]
    assert drawn == ([6] if with_seed else [])
