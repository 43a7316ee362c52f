"""The drafter's embeddings at masked positions, its argmax and its largest logits; the target's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("sglang")

from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.graph_shared_output import GraphSharedOutput

from sglang_dflash.errors import DFlashError
from sglang_dflash.model.vocabulary import BlockLogits, TargetVocabulary
from sglang_dflash.ops import Noise

pytestmark = pytest.mark.sglang


def table() -> nn.Embedding:
    return nn.Embedding.from_pretrained(torch.randn(8, 4, generator=torch.Generator().manual_seed(0)))


def target() -> Any:
    """A minimal target: an embedding table equals the LM head."""
    return SimpleNamespace(get_input_embeddings=table, lm_head=table())


def drafter(output_scale: float = 1.0, logit_cap: float | None = None) -> Any:
    return SimpleNamespace(mask_token_id=5, input_scale=1.0, output_scale=output_scale, logit_cap=logit_cap)


@pytest.fixture
def one_rank(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Hidden states of six tokens, on a server without tensor parallelism."""
    alone = SimpleNamespace(tp_size=1, tp_group=SimpleNamespace(world_size=1))
    monkeypatch.setattr("sglang_dflash.model.vocabulary.get_parallel", lambda: alone)
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("dtype", [None, torch.uint8, torch.int32, torch.float8_e4m3fn])
def test_a_quantised_head_drafts_by_the_targets_own_product(dtype: torch.dtype | None, one_rank: Tensor) -> None:
    """AWQ's and GPTQ's head has no weight; NVFP4's is packed in uint8, in Marlin's form in int32."""
    weight = table().weight
    padded = torch.cat((weight, 10 * weight[:3]))  # the layer computes padding too, which would win
    head = SimpleNamespace(
        shard_indices=SimpleNamespace(num_org_elements=8, org_vocab_start_index=0),
        quant_method=SimpleNamespace(apply=lambda layer, x, bias: x @ padded.T),
        **({} if dtype is None else {"weight": torch.zeros(11, 2).to(dtype)}),
    )
    model = SimpleNamespace(get_input_embeddings=table, lm_head=head)
    vocabulary = TargetVocabulary.of(model, drafter(output_scale=0.5, logit_cap=3.0), None)
    best = logits_of(one_rank).topk(4)
    logits, tokens = vocabulary.top_k(one_rank, 4)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(logits, 3 * torch.tanh(best.values / 6))


def test_a_target_without_an_lm_head_is_refused() -> None:
    model = target()
    del model.lm_head
    with pytest.raises(DFlashError, match="no lm_head"):
        TargetVocabulary.of(model, drafter(), None)


Shards = Callable[[Tensor, Callable[..., Any]], Any]


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> Shards:
    """Run a method on two ranks of four tokens each; the second one receives what both sent."""
    whole = TargetVocabulary.of(target(), drafter(), None)
    shards = [replace(whole, first_id=first, num_ids=4, lm_head=table()) for first in (0, 4)]
    shards[1].lm_head.weight.data = shards[1].lm_head.weight[4:]
    for shard in shards:
        shard.lm_head.shard_indices = None

    def run(hidden: Tensor, method: Callable[..., Any], **options: Any) -> Any:
        sent: list[Tensor] = []

        def all_gather(mine: Tensor, dim: int) -> Tensor:
            sent.append(mine)
            return torch.cat((sent * 2)[:2], dim)

        group = SimpleNamespace(world_size=2, all_gather=all_gather)
        monkeypatch.setattr("sglang_dflash.model.vocabulary.get_parallel", lambda: SimpleNamespace(tp_group=group))
        return [method(shard, hidden, **options) for shard in shards][1]

    return run


@pytest.fixture
def hidden() -> Tensor:
    """Of which the best two tokens of a row are on one rank or on both."""
    hidden = torch.randn(40, 4, generator=torch.Generator().manual_seed(2))
    best = logits_of(hidden).topk(2).indices
    assert {tuple(sorted(row)) for row in (best // 4).tolist()} == {(0, 0), (0, 1), (1, 1)}
    return hidden


def logits_of(hidden: Tensor) -> Tensor:
    return hidden @ table().weight.T


@pytest.mark.parametrize("k", [1, 2, 3])
def test_ranks_agree_on_the_largest_logits_and_take_the_first_of_equals(
    k: int, hidden: Tensor, two_ranks: Shards
) -> None:
    logits, tokens = two_ranks(hidden, TargetVocabulary.top_k, k=k)
    best = logits_of(hidden).topk(k)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(logits, best.values)
    logits, tokens = two_ranks(torch.zeros(1, 4), TargetVocabulary.top_k, k=4)
    assert (logits.tolist(), tokens[0, 0].item(), set(tokens[0].tolist())) == ([[0.0] * 4], 0, {0, 1, 2, 3})


def test_ranks_that_hold_the_whole_head_send_nothing(hidden: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 4's, a plain embedding: a second copy of each token would make every margin 0."""
    group = SimpleNamespace(world_size=2)  # cannot gather
    monkeypatch.setattr("sglang_dflash.model.vocabulary.get_parallel", lambda: SimpleNamespace(tp_group=group))
    whole, one = TargetVocabulary.of(target(), drafter(logit_cap=3.0), None), torch.ones(40)
    noise = Noise(one.long(), one, one.long(), one, 0 * one)  # greedy
    best = (3.0 * torch.tanh(logits_of(hidden) / 3.0)).topk(2)
    _, margins = whole.likeliest(torch.arange(40), hidden[:, None], torch.arange(40), noise)
    torch.testing.assert_close(margins[:, 0], -best.values.diff()[:, 0])
    assert torch.equal(whole.top_k(hidden, 2)[1], best.indices)


VOCAB, PADDED, ROWS = 500, 512, 6


class Processor(LogitsProcessor):
    """SGLang's conversion of logits, without what only its LM head reads."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.vocab_size, self.final_logit_softcapping = VOCAB, None
        self.use_attn_tp_group = self.use_tp_lm_head_all_to_all = False

    def convert(self, logits: Tensor, mode: ForwardMode, buffer: Tensor | None = None) -> Tensor:
        return self._copy_logits_to_buffer(logits, SimpleNamespace(forward_mode=mode, next_token_logits_buffer=buffer))


@pytest.fixture
def logits() -> Tensor:
    """With ties, NaN and infinities, and padding that is larger than every token."""
    logits = torch.randn(ROWS, PADDED, generator=torch.Generator().manual_seed(3)).mul(2).round()
    logits[0, [7, 9]] = torch.nan
    logits[1, [3, 30]], logits[2] = torch.inf, -torch.inf
    logits[:, VOCAB:] = torch.inf
    return logits.to(torch.bfloat16)


def model_runner() -> Any:
    return SimpleNamespace(
        model=nn.Sequential(Processor()),
        model_config=SimpleNamespace(vocab_size=VOCAB),
        capture_tail_hooks=[],
        graph_shared_output=GraphSharedOutput(device=torch.device("cpu"), max_rows=ROWS),
    )


@pytest.mark.parametrize("mode", [ForwardMode.TARGET_VERIFY, ForwardMode.DECODE])
def test_a_block_of_greedy_requests_has_no_float32_logits(mode: ForwardMode, logits: Tensor, one_rank: Tensor) -> None:
    """Others have SGLang's, in the memory that its graphs write; the tokens are the same."""
    runner = model_runner()
    expected = Processor().convert(logits, mode)
    assert expected.dtype == torch.float32 and (expected.sort().values.diff() == 0).any()
    kept = BlockLogits(runner, TargetVocabulary.of(target(), drafter(), None))
    buffer = runner.graph_shared_output.get_logits_buffer(VOCAB, rows=ROWS)
    found = runner.model[0].convert(logits, mode, buffer)
    assert (found.dtype, found.data_ptr(), found.shape) == (torch.bfloat16, logits.data_ptr(), expected.shape)
    assert torch.equal(kept.argmax(found), expected.argmax(-1))
    whole = kept.whole(found[:4])  # of a padded graph
    torch.testing.assert_close(whole, expected[:4], rtol=0, atol=0, equal_nan=True)
    assert whole.data_ptr() == buffer.data_ptr()
    runner.graph_shared_output = None  # without graphs
    torch.testing.assert_close(kept.whole(found), expected, rtol=0, atol=0, equal_nan=True)


def test_ranks_gather_their_16_bit_logits(logits: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_dflash.model.vocabulary.get_parallel", lambda: SimpleNamespace(tp_size=2))
    runner, half = model_runner(), PADDED // 2
    processor = runner.model[0]
    processor.do_tensor_parallel_all_gather = True
    processor._logits_gatherer = lambda shard: torch.cat((shard, logits[:, half:]), dim=1)
    kept = BlockLogits(runner, TargetVocabulary.of(target(), drafter(), None))
    shard = processor.convert(logits[:, :half].contiguous(), ForwardMode.TARGET_VERIFY)
    assert shard.dtype == torch.bfloat16
    torch.testing.assert_close(kept.whole(shard), logits[:, :VOCAB].float(), rtol=0, atol=0, equal_nan=True)
