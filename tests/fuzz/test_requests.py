"""A request that no sampler can compute with is refused by name, and stops no other."""

from __future__ import annotations

from types import SimpleNamespace as Some
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("sglang")

from sglang.srt.layers import sampler
from sglang.srt.sampling import sampling_batch_info
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_dflash.features import requests
from sglang_dflash.features.penalties import Penalties
from sglang_dflash.features.seeds import SeededSampler, Seeds
from sglang_dflash.worker.accept import for_block
from tests.fuzz.values import FLOATS, INTEGERS, VALUES, fuzz
from tests.support import configs
from tests.support.catalogue import BAD, GOOD, UNUSUAL, VOCAB

pytestmark = pytest.mark.sglang

WIDTH, LONGEST = 3, 64
TOKENIZER = Some(additional_stop_token_ids=None, eos_token_id=VOCAB - 1, encode=lambda text, **_: [*range(len(text))])
EXEC = Some(
    deterministic=Some(enable_deterministic_inference=False, rl_on_policy_target=None),
    features=Some(enable_custom_logit_processor=False, sampling_mask_max_tokens=8, enable_watermark=False),
    kernel=Some(sampling_backend="pytorch"),
)
BIAS = st.dictionaries(st.integers(0, VOCAB).map(str), st.sampled_from(FLOATS) | VALUES)
NUMBERS = st.sampled_from([*INTEGERS, *FLOATS]) | st.floats() | st.integers()
STOPS = st.lists(st.integers(0, VOCAB) | st.sampled_from(INTEGERS[:-1]), max_size=3)
# Usual values, so that requests get far, and hostile ones.
USUAL = {
    "temperature": [0.0, 0.7], "top_p": [0.9], "top_k": [-1, 5], "min_p": [0.1], "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [0.5], "repetition_penalty": [0.01, 2.0], "min_new_tokens": [5], "max_new_tokens": [None, 40],
    "sampling_seed": [0, -(2**63)], "custom_params": [None, {"__req__": 1}], "stop": ["x", ["x", "y"]], "n": [2],
}  # fmt: skip
REQUEST = st.fixed_dictionaries(
    {},
    optional={
        **{name: st.sampled_from(usual) | st.sampled_from(usual) | NUMBERS | VALUES for name, usual in USUAL.items()},
        **{"logit_bias": BIAS, "stop_token_ids": STOPS, "output_ids": STOPS.map(len).map(range).map(list)},
        "return_hidden_states": st.booleans(),
    },
)


def arrived(output_ids: list[int] = [], return_hidden_states: bool = False, **params: Any) -> Any:  # noqa: B006
    """The request as SGLang hands it to its scheduler; None if SGLang refuses it."""
    if not isinstance(params.get("logit_bias"), dict | None):
        return None  # by the server's parser of JSON
    try:
        sampling = SamplingParams(**params)
        sampling.normalize(TOKENIZER)
        sampling.verify(VOCAB)
    except Exception:  # noqa: BLE001  of many kinds; each is an answer to the client
        return None
    sampling.max_new_tokens = min(LONGEST, LONGEST if sampling.max_new_tokens is None else sampling.max_new_tokens)
    sampling.min_new_tokens = min(sampling.min_new_tokens, sampling.max_new_tokens)
    request = Some(sampling_params=sampling, origin_input_ids=[1, 2, 3], output_ids=output_ids, vocab_size=VOCAB)
    vars(request).update(eos_token_ids={VOCAB - 1}, tokenizer=TOKENIZER, return_hidden_states=return_hidden_states)
    vars(request).update(return_sampling_mask=False, sampling_logprobs_mode=None, custom_logit_processor=None)
    return request


class Batch(Some):
    __slots__ = ("__weakref__",)  # SGLang refers to it weakly


@pytest.fixture(autouse=True)
def our_server(monkeypatch: pytest.MonkeyPatch) -> None:
    configs.serve(monkeypatch)
    for module in (sampling_batch_info, sampler):
        monkeypatch.setattr(module, "get_exec", lambda: EXEC)


def serve(*asked: dict[str, Any]) -> list[str | None]:
    """A block's sampling as the worker does it; our refusal of each request that SGLang lets through."""
    reqs = [request for each in asked if (request := arrived(**each))]
    refusals = [requests.refuse_request(lambda *_: None, request, True) for request in reqs]
    if not reqs:
        return []
    lengths = torch.tensor([len(req.output_ids) + 3 for req in reqs])
    pool, rows = Some(req_to_token=torch.zeros(5, 4, dtype=torch.int32)), torch.arange(1, 1 + len(reqs))
    batch = Batch(reqs=reqs, decoding_reqs=None, device="cpu", req_pool_indices=rows, req_to_token_pool=pool)
    batch.seq_lens = lengths
    info = batch.sampling_info = sampling_batch_info.SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    info.update_penalties()
    penalties = Penalties()
    penalties.start(batch)
    drafts = torch.arange(len(reqs) * WIDTH).view(-1, WIDTH) % VOCAB
    logits = torch.linspace(-30, 30, len(reqs) * WIDTH * VOCAB).view(-1, WIDTH, VOCAB)
    positions = lengths[:, None] + torch.arange(WIDTH)
    penalties.apply(batch, logits, drafts, positions)
    if info.logit_bias is not None:
        logits.add_(info.logit_bias[:, None])
    seeds = Seeds(Some(req_to_token=pool.req_to_token, device="cpu"), 0)
    seeds.start(batch)
    block = for_block(info, WIDTH)
    output = Some(next_token_logits=logits.flatten(0, 1))
    drawn = our_sampler()(output, block, False, [], [], positions.flatten())
    assert drawn.shape == (len(reqs) * WIDTH,) and 0 <= int(drawn.min()) <= int(drawn.max()) < VOCAB
    accepted = Some(out_tokens=drawn.view(-1, WIDTH).long(), accept_lens=torch.full((len(reqs),), WIDTH))
    penalties.commit(Some(batch=batch, accepted=accepted))
    return refusals


def our_sampler() -> SeededSampler:
    made = SeededSampler.__new__(SeededSampler)  # its constructor needs a server's parallel state
    torch.nn.Module.__init__(made)
    made.tp_sync_group = made.cp_sync_group = made.rl_on_policy_target = None
    made.enable_deterministic = made.use_log_softmax_logprob = made.use_ascend_backend = False
    made._sync_token_ids_across_tp = lambda *_: None
    return made


@fuzz
@given(st.lists(REQUEST, min_size=1, max_size=3))
def test_requests(asked: list[dict[str, Any]]) -> None:
    serve(*asked)


@pytest.mark.parametrize("params", BAD + UNUSUAL, ids=lambda params: ascii(params)[:60])
def test_an_unusable_request_is_refused_and_a_good_one_in_the_same_batch_is_served(params: dict[str, Any]) -> None:
    """Each of ``BAD`` once ended the scheduler; the others are merely unusual."""
    refused, served = serve(params, GOOD)
    assert served is None and (refused is not None) is (params in BAD)
    if refused is not None:
        assert next(iter(params)) in refused and "Fix: " in refused
