"""Requests' sampling parameters: what SGLang lets through, our hook and our sampling in a batch of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.drafter.served import note_our_worker, our_worker_serves
from sglang_dflash.hooks.requests import refuse_request
from sglang_dflash.worker.accept import for_block
from sglang_dflash.worker.sampling.penalties import Penalties
from sglang_dflash.worker.sampling.seeded import SeededSampler, mark_seeded_rows
from tests.fuzz.part import Part
from tests.fuzz.values import FLOATS, INTEGERS, pick

VOCAB, WIDTH, SLOTS, LONGEST = 16, 3, 5, 64
_TOKENIZER = SimpleNamespace(
    additional_stop_token_ids=None, eos_token_id=VOCAB - 1, encode=lambda text, **_: list(range(len(text)))
)
_EXEC = SimpleNamespace(
    deterministic=SimpleNamespace(enable_deterministic_inference=False, rl_on_policy_target=None),
    features=SimpleNamespace(enable_custom_logit_processor=False, sampling_mask_max_tokens=8, enable_watermark=False),
    kernel=SimpleNamespace(sampling_backend="pytorch"),
)


class Batch(SimpleNamespace):
    """What SGLang refers to weakly."""

    __slots__ = ("__weakref__",)


_USUAL: dict[str, list[Any]] = {
    "temperature": [0.0, 0.7, 1.0, 1e-5],
    "top_p": [0.1, 0.9, 1.0],
    "top_k": [-1, 1, 5, VOCAB],
    "min_p": [0.0, 0.1, 1.0],
    "frequency_penalty": [-2.0, 0.5, 2.0],
    "presence_penalty": [-2.0, 0.5, 2.0],
    "repetition_penalty": [0.01, 0.9, 1.0, 2.0],
    "min_new_tokens": [0, 1, 5],
    "max_new_tokens": [None, 1, 40],
    "stop_token_ids": [None, [3], [VOCAB], [1, VOCAB - 1]],
    "sampling_seed": [None, 0, 7, -(2**63)],
    "logit_bias": [None, {"3": 5.0}, {"3": float("-inf")}],
    "custom_params": [None, {}, {"__req__": 1}],
    "stop": [None, "x", ["x", "y"]],
    "n": [1, 2],
}


def parts(_: Path) -> list[Part]:
    return [Part("requests' sampling parameters", batch_of, serve, 4_000)]


def batch_of(random: Random, values: list[Any]) -> list[dict[str, Any]]:
    return [_request(random, values) for _ in range(random.randint(1, 3))]


def _request(random: Random, values: list[Any]) -> dict[str, Any]:
    names = random.sample(sorted(_USUAL), random.randint(1, 5))
    params = {name: random.choice(_USUAL[name]) for name in names}
    changed = random.choice(names)
    kind = random.random()
    if kind < 0.3:
        params[changed] = random.choice(INTEGERS + FLOATS)
    elif kind < 0.4:
        params[changed] = pick(random, values)
    elif kind < 0.5:
        tokens = [str(abs(random.choice((random.randrange(VOCAB), *INTEGERS))) % 10**25) for _ in range(VOCAB)]
        params["logit_bias"] = {token: random.choice((*FLOATS, pick(random, values))) for token in tokens}
    elif kind < 0.6:
        params["stop_token_ids"] = random.sample(INTEGERS, 2)
    if random.random() < 0.3:
        params["output_ids"] = random.choices(range(VOCAB), k=4)
    if random.random() < 0.1:
        params["return_hidden_states"] = True
    return params


def serve(asked: list[dict[str, Any]]) -> list[str | None]:
    """A prefill's and a block's sampling, as the worker does it for the requests that reach it.

    Returns:
        For each of those that SGLang lets through, our refusal.
    """
    reqs = [req for each in asked if (req := _arrive(**each)) is not None]
    if not reqs:
        return []
    with _our_server():
        refusals = [refuse_request(lambda *_: None, req, True) for req in reqs]
        for req, refusal in zip(reqs, refusals, strict=True):
            if refusal is not None:
                req.origin_input_ids = [0]  # SGLang answers it with an error after a prefill of one token
        batch = Batch(
            reqs=reqs,
            decoding_reqs=None,
            device="cpu",
            req_pool_indices=torch.arange(1, 1 + len(reqs)),
            req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(SLOTS, 4, dtype=torch.int32)),
            seq_lens=torch.tensor([len(req.origin_input_ids) + len(req.output_ids) for req in reqs]),
        )
        info = batch.sampling_info = sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
        info.update_penalties()
        penalties = Penalties()
        penalties.start(batch)
        mark_seeded_rows(info, reqs)
        drafts = torch.arange(len(reqs) * WIDTH).view(-1, WIDTH) % VOCAB
        logits = torch.linspace(-30, 30, len(reqs) * WIDTH * VOCAB).view(-1, WIDTH, VOCAB)
        positions = batch.seq_lens[:, None] + torch.arange(WIDTH)
        penalties.apply(batch, logits, drafts, positions)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias[:, None])
        block = for_block(info, WIDTH)
        mark_seeded_rows(block, reqs, WIDTH)
        output = SimpleNamespace(next_token_logits=logits.flatten(0, 1))
        drawn = _sampler()(output, block, False, [], [], positions.flatten())
        assert drawn.shape == (len(reqs) * WIDTH,) and int(drawn.min()) >= 0 and int(drawn.max()) < VOCAB
        penalties.count(batch, drawn.view(-1, WIDTH).long(), torch.full((len(reqs),), WIDTH))
        return refusals


def _arrive(output_ids: list[int] = [], return_hidden_states: bool = False, **params: Any) -> Any:  # noqa: B006
    """The request as SGLang's server, tokenizer process and scheduler pass it on; None if one of them refuses it."""
    if not isinstance(params.get("logit_bias"), dict | None):
        return None  # the server's parser of JSON: "expected a map"
    try:
        sampling_params = SamplingParams(**params)
        sampling_params.normalize(_TOKENIZER)
        sampling_params.verify(VOCAB)
    except Exception:  # noqa: BLE001  SGLang's own refusal, of many kinds: each is an answer to the client
        return None
    most = sampling_params.max_new_tokens
    sampling_params.max_new_tokens = LONGEST if most is None else min(most, LONGEST)
    sampling_params.min_new_tokens = min(sampling_params.min_new_tokens, sampling_params.max_new_tokens)
    return SimpleNamespace(
        sampling_params=sampling_params,
        origin_input_ids=[1, 2, 3],
        output_ids=output_ids,
        eos_token_ids={VOCAB - 1},
        tokenizer=_TOKENIZER,
        vocab_size=VOCAB,
        return_hidden_states=return_hidden_states,
        return_sampling_mask=False,
        sampling_logprobs_mode=None,
        custom_logit_processor=None,
    )


@contextmanager
def _our_server() -> Iterator[None]:
    before = our_worker_serves()
    note_our_worker(True)
    try:
        with (
            patch.object(sampling_batch_info, "get_exec", lambda: _EXEC),
            patch.object(sglang_sampler, "get_exec", lambda: _EXEC),
        ):
            yield
    finally:
        note_our_worker(before)


def _sampler() -> SeededSampler:
    """Outside a server SGLang's constructor finds no parallel state."""
    sampler = SeededSampler.__new__(SeededSampler)
    torch.nn.Module.__init__(sampler)
    sampler.tp_sync_group = sampler.cp_sync_group = sampler.rl_on_policy_target = None
    sampler.enable_deterministic = sampler.use_log_softmax_logprob = sampler.use_ascend_backend = False
    sampler._sync_token_ids_across_tp = lambda *_: None
    return sampler
