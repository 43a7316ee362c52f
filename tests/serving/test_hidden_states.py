"""``return_hidden_states`` under DFLASH: plain decoding's states, token by token, or the drafter's input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_dflash_lab.pairs import drafter_path, target_path
from sglang_dflash_lab.train.drafter import context_features
from sglang_dflash_lab.train.hf import load_model
from tests.support.files import load_drafter
from tests.support.generation import Answer, flush, generate, generate_all
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR, NEW_TOKENS = "tiny-hybrid", 40
LAYERS = {"sampling_params": {"custom_params": {"hidden_states": "target_layers"}}}
PROMPTS = [*corpus(PAIR, 4), *random_prompts(PAIR, 2)]


def ask(server: Server, prompt: list[int], **body: Any) -> Answer:
    return generate(server, prompt, NEW_TOKENS, return_hidden_states=True, **body)


def rows(answer: Answer) -> Tensor:
    """The states of prompt and answer but for its last token, [tokens, size]."""
    prompt, *others = answer.meta["hidden_states"]
    return torch.tensor([*prompt, *others])


def close(found: Tensor, expected: Tensor) -> None:
    """Sums of a row are rounded to its largest value, and blocks of other widths sum in another order."""
    largest = expected.abs().amax(1, keepdim=True)
    torch.testing.assert_close(found / largest, expected / largest, rtol=0, atol=1e-4)


def test_states_are_plain_decodings(plain_hybrid: Server, server: Server) -> None:
    for prompt in PROMPTS:
        flush(plain_hybrid), flush(server)
        plain, found = ask(plain_hybrid, prompt), ask(server, prompt)
        assert found.tokens == plain.tokens
        assert len(found.meta["hidden_states"]) == len(plain.meta["hidden_states"]) == len(plain.tokens)
        close(rows(found), rows(plain))


def test_states_of_target_layers_are_the_drafters_input(dflash_hybrid: Server) -> None:
    layers = load_drafter(drafter_path(PAIR)).target_layer_ids
    target = load_model(target_path(PAIR), dtype=torch.float32)
    for prompt in PROMPTS:
        flush(dflash_hybrid)
        answer = ask(dflash_hybrid, prompt, **LAYERS)
        ids = torch.tensor([[*prompt, *answer.tokens[:-1]]])
        with torch.no_grad():
            states = target.model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        expected = context_features(states, layers)[0]
        assert rows(answer).shape == expected.shape == (ids.shape[1], len(layers) * target.config.hidden_size)
        torch.testing.assert_close(rows(answer), expected, rtol=1e-3, atol=1e-3)


def test_requests_of_a_batch_receive_what_each_requests(server: Server) -> None:
    """Each repeats an answer that it got alone, whatever runs beside it; the rest has no states."""
    kinds: list[dict[str, Any]] = [{}, {"return_hidden_states": True}, {"return_hidden_states": True, **LAYERS}]
    if server.get("/server_info").json()["speculative_draft_model_path"] is None:
        kinds.pop()

    def kind(number: int) -> dict[str, Any]:
        return kinds[number % len(kinds)]

    alone = []
    for number, prompt in enumerate(PROMPTS):
        flush(server)
        alone.append(generate(server, prompt, NEW_TOKENS, **kind(number)))
    flush(server)
    together = generate_all(server, PROMPTS, len(PROMPTS), NEW_TOKENS, kind)
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one.tokens == other.tokens
        assert ("hidden_states" in other.meta) == bool(kind(number))
        if kind(number):
            generated = len(one.tokens) - 1  # a prefix that another request cached has no states
            close(rows(other)[-generated:], rows(one)[-generated:])
    assert len({rows(answer).shape[1] for answer in together if "hidden_states" in answer.meta}) == len(kinds) - 1


@pytest.mark.slow
def test_target_layers_need_a_drafter(copies_alone: Server) -> None:
    answer = copies_alone.post("/generate", {"input_ids": PROMPTS[0], "return_hidden_states": True, **LAYERS})
    assert answer.status_code == 400 and "no drafter" in answer.text
