"""The penalty counts that the worker keeps on the device, through the life of requests in shared slots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.worker.sampling.penalties import Penalties, ban_early_stops

pytestmark = pytest.mark.sglang

VOCAB, SLOTS = 11, 6


def request(output_ids: list[int] | None = None, min_new_tokens: int = 0, **penalties: float) -> SimpleNamespace:
    params = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, **penalties}
    tokenizer = SimpleNamespace(additional_stop_token_ids={9}, eos_token_id=10)
    return SimpleNamespace(
        origin_input_ids=[1, 2, 3],
        output_ids=output_ids or [],
        eos_token_ids={10},
        tokenizer=tokenizer,
        sampling_params=SimpleNamespace(min_new_tokens=min_new_tokens, stop_token_ids=None, **params),
    )


def batch_of(slots: list[int], *reqs: SimpleNamespace, decoding: tuple[SimpleNamespace, ...] = ()) -> Any:
    """A forward-only batch as the scheduler hands it over: SGLang's matrices neutral where a penalty is asked for."""
    asked = any(request_asks(req) for req in reqs)
    info = SimpleNamespace(
        vocab_size=VOCAB,
        acc_additive_penalties=torch.zeros(len(reqs), VOCAB) if asked else None,
        acc_scaling_penalties=torch.ones(len(reqs), VOCAB) if asked else None,
    )
    return SimpleNamespace(
        reqs=list(reqs),
        decoding_reqs=list(decoding) or None,
        req_pool_indices=torch.tensor(slots),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(SLOTS, 4, dtype=torch.int32)),
        seq_lens=torch.tensor([3 + len(req.output_ids) for req in reqs]),
        sampling_info=info,
        device="cpu",
    )


def request_asks(req: SimpleNamespace) -> bool:
    p = req.sampling_params
    return (p.frequency_penalty, p.presence_penalty, p.repetition_penalty, p.min_new_tokens) != (0, 0, 1, 0)


def frequency_counts(penalties: Penalties, batch: Any) -> torch.Tensor:
    """How often each token counts as generated, read off a frequency penalty of 1 on zero logits."""
    logits = torch.zeros(len(batch.reqs), 1, VOCAB)
    anchors = torch.zeros(len(batch.reqs), 1, dtype=torch.int64)
    penalties.apply(batch, logits, anchors, torch.full((len(batch.reqs), 1), 100))
    return -logits[:, 0]


def test_a_slot_forgets_its_last_owner() -> None:
    penalties = Penalties()
    first = batch_of([3], request(frequency_penalty=1.0))
    penalties.start(first)
    penalties.count(first, torch.tensor([[5]]), torch.tensor([1]))
    plain = batch_of([3], request())
    penalties.start(plain)
    # It shares its next batch with a request that asks for a penalty.
    asking = request(frequency_penalty=1.0)
    penalties.start(batch_of([1], asking))
    assert not frequency_counts(penalties, batch_of([3, 1], plain.reqs[0], asking)).any()
    again = batch_of([3], request(frequency_penalty=1.0))
    penalties.start(again)
    assert not frequency_counts(penalties, again).any()


def test_a_retracted_request_keeps_its_history() -> None:
    penalties = Penalties()
    req = request([5, 5, 7], frequency_penalty=1.0, presence_penalty=0.5, repetition_penalty=1.5)
    batch = batch_of([0], req)
    penalties.start(batch)
    info = batch.sampling_info
    additive, scaling = torch.zeros(1, VOCAB), torch.ones(1, VOCAB)
    additive[0, 5], additive[0, 7] = -2.5, -1.5
    scaling[0, [5, 7]] = 1.5
    assert torch.equal(info.acc_additive_penalties, additive)
    assert torch.equal(info.acc_scaling_penalties, scaling)


def test_stop_tokens_are_banned_up_to_the_minimum_inside_a_block() -> None:
    waiting, free, done = request(min_new_tokens=3), request(), request([1, 1, 1], min_new_tokens=3)
    logits = torch.zeros(3, 4, VOCAB)
    positions = torch.tensor([[3, 4, 5, 6]] * 3)  # prompt of 3: position 3 holds new token 0, its logits choose token 1
    ban_early_stops([waiting, free, done], logits, positions)
    banned = torch.zeros(3, 4, VOCAB, dtype=torch.bool)
    banned[0, :2, 9:] = True
    assert torch.equal(logits.isneginf(), banned)


def test_the_first_token_after_a_retraction_may_stop_once_the_minimum_is_reached() -> None:
    penalties = Penalties()
    batch = batch_of([0, 1], request([4, 4], min_new_tokens=2), request([4], min_new_tokens=2))
    penalties.start(batch)
    assert batch.sampling_info.acc_additive_penalties.isneginf().any(dim=1).tolist() == [False, True]
