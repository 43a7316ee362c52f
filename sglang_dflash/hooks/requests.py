"""Reject requests that need a feature DFLASH lacks or that no sampler can use."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.plan import serving
from sglang_dflash.plan.rules import cannot_roll_back
from sglang_dflash.upstream.worker import BaseGrammarObject, get_exec

_REASONS = {
    "return_hidden_states": "the hidden states of a block go to the drafter and are not kept per output token",
    "return_sampling_mask": "the token sets after filtering are not kept per block position",
}
# Bounds that keep float32 logits finite after temperature, bias and penalty. The softmax of an infinity is NaN, which
# would stop the scheduler for all requests. SGLang allows every float64.
_LARGEST, _SMALLEST = 1e30, 1e-6
_TOP_K_ALL = 1 << 30  # SGLang's value for the whole vocabulary, stored as int32
# Parameters of a rejected request, which SGLang prefills nevertheless.
_HARMLESS = {"temperature": 1.0, "top_k": 1, "repetition_penalty": 1.0, "min_new_tokens": 0, "logit_bias": None}


def refuse_request(original: Callable[[Any, bool], str | None], req: Any, enable_overlap: bool) -> str | None:
    """Hook around ``validate_dflash_request``: return the error for the client, or None."""
    if serving.plan is None:
        return original(req, enable_overlap)
    _drop_impossible_stops(req)
    refusal = next(_refusals(req), None)
    if refusal is None:
        return None
    req.sampling_params = copy.copy(req.sampling_params)
    for name, harmless in _HARMLESS.items():
        setattr(req.sampling_params, name, harmless)
    return str(refusal)


def _refusals(req: Any) -> Iterator[DFlashError]:
    for feature, reason in _REASONS.items():
        if getattr(req, feature):
            yield DFlashError(
                f"{feature} is not available under DFLASH: {reason}",
                expected=f"a request without {feature}",
                remedy="send it to a server without --speculative-algorithm",
            )
    for value, expected in _unusable(req.sampling_params, req.vocab_size):
        yield DFlashError(value, expected=expected, remedy="correct it, or leave it out")


def _drop_impossible_stops(req: Any) -> None:
    # A token outside the vocabulary never stops a request, but it is an index if another request has min_new_tokens.
    stops = req.sampling_params.stop_token_ids
    if stops and not all(0 <= token < req.vocab_size for token in stops):
        req.sampling_params = copy.copy(req.sampling_params)
        req.sampling_params.stop_token_ids = {token for token in stops if 0 <= token < req.vocab_size} or None


def _unusable(params: Any, vocab_size: int) -> Iterator[tuple[str, str]]:
    # Parameters that SGLang accepts but no sampler can use: value and expectation.
    if not params.temperature <= _LARGEST:
        yield f"temperature {params.temperature}", f"at most {_LARGEST:g}"
    if not (isinstance(params.top_k, int) and params.top_k <= _TOP_K_ALL):
        yield f"top_k {params.top_k}", f"-1, or an integer of at most {_TOP_K_ALL}"
    if not params.repetition_penalty >= _SMALLEST:
        yield f"repetition_penalty {params.repetition_penalty}", f"at least {_SMALLEST:g}"
    bias = params.logit_bias or {}
    for token, value in bias.items():
        if not isinstance(value, int | float) or not value <= _LARGEST:  # minus infinity bans a token
            yield f"logit_bias {value} of token {token}", f"at most {_LARGEST:g}"
    if len(bias) >= vocab_size and all(value < -_LARGEST for value in bias.values()):
        yield "logit_bias that bans every token", "one token that may be chosen"


def refuse_without_rollback(backend: Any, *_: Any, **__: Any) -> None:
    """Hook after ``create_grammar_backend``: a grammar reads drafts, so it must be able to forget rejected ones.

    Raises:
        DFlashError: grammars of this backend, which may be a plugin's, have no ``rollback``. The first constrained
            request would end the server.
    """
    compiles = getattr(backend, "grammar_backend", backend)  # without the wrapper of reasoning parsers
    if serving.plan is None or compiles is None:
        return
    grammar = type(compiles.dispatch_regex("a"))
    if grammar.rollback is BaseGrammarObject.rollback:
        raise cannot_roll_back(get_exec().kernel.grammar_backend, grammar.__name__)
