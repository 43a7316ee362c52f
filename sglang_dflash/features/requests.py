"""Requests in the scheduler: which ones are rejected, and where the others end.

SGLang searches all tokens of a step at once for an end, one kind of end after the other. In plain decoding it searches
after every token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from sglang.srt.constrained.base_grammar_backend import BaseGrammarObject
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.runtime_context import get_exec
from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

from sglang_dflash.errors import DFlashError
from sglang_dflash.features.hidden import FIELD, TARGET_LAYERS, wants_target_layers
from sglang_dflash.launch.plan import current
from sglang_dflash.launch.rules import cannot_roll_back
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

# bounds that keep float32 logits finite: NaN would stop the scheduler
_MAX, _MIN = 1e30, 1e-6
_TOP_K_ALL = 1 << 30  # SGLang's value for the whole vocabulary
# SGLang prefills a rejected request nevertheless
_HARMLESS = {"temperature": 1.0, "top_k": 1, "repetition_penalty": 1.0, "min_new_tokens": 0, "logit_bias": None}


def refuse_request(_: Callable[..., str | None], req: Any, enable_overlap: bool) -> str | None:
    """Hook around ``validate_dflash_request``: return the error for the client, or None."""
    _drop_impossible_stops(req)
    refusal = next(_refusals(req), None)
    if refusal is None:
        return None
    req.sampling_params = copy.copy(req.sampling_params)
    for name, harmless in _HARMLESS.items():
        setattr(req.sampling_params, name, harmless)
    return str(refusal)


def refuse_mask(original: Callable[..., str | None], req: Any, spec_algorithm: Any) -> str | None:
    """Hook around ``validate_spec_sampling_mask_request``, which also refuses what SGLang's own worker lacks."""
    return original(req, spec_algorithm) if SIMULATE_ACC_LEN > 0 else None


def _refusals(req: Any) -> Iterator[DFlashError]:
    if wants_target_layers(req) and not current.worker.plan.has_drafter:
        feature = f"{FIELD}: {TARGET_LAYERS}"
        problem = f"{feature} is not available under DFLASH: no drafter"
        yield DFlashError(problem, remedy="send it to a server without --speculative-algorithm")
    for problem in _unusable(req.sampling_params, req.vocab_size):
        yield DFlashError(problem, remedy="correct it, or leave it out")


def _drop_impossible_stops(req: Any) -> None:
    # min_new_tokens of another request would use it as an index
    stops = req.sampling_params.stop_token_ids
    if stops and not all(0 <= token < req.vocab_size for token in stops):
        req.sampling_params = copy.copy(req.sampling_params)
        req.sampling_params.stop_token_ids = {token for token in stops if 0 <= token < req.vocab_size} or None


def _unusable(params: Any, vocab_size: int) -> Iterator[str]:
    if not params.temperature <= _MAX:
        yield f"temperature {params.temperature} is no number up to {_MAX:g}"
    if not (isinstance(params.top_k, int) and params.top_k <= _TOP_K_ALL):
        yield f"top_k {params.top_k} is no integer up to {_TOP_K_ALL}"
    if not params.repetition_penalty >= _MIN:
        yield f"repetition_penalty {params.repetition_penalty} is no number from {_MIN:g}"
    bias = params.logit_bias or {}
    for token, value in bias.items():
        if not isinstance(value, int | float) or not value <= _MAX:  # minus infinity bans a token
            yield f"logit_bias {value} of token {token} is no number up to {_MAX:g}"
    if len(bias) >= vocab_size and all(value < -_MAX for value in bias.values()):
        yield "logit_bias bans every token"


def refuse_without_rollback(backend: Any, *_: Any, **__: Any) -> None:
    """Hook after ``create_grammar_backend``: DFlashError for grammars that cannot roll rejected drafts back."""
    compiles = getattr(backend, "grammar_backend", backend)  # without the wrapper of reasoning parsers
    if compiles is None:
        return
    grammar = type(compiles.dispatch_regex("a"))
    if grammar.rollback is BaseGrammarObject.rollback:
        raise cannot_roll_back(get_exec().kernel.grammar_backend, grammar.__name__)


def end_at_first_token(original: Callable[..., None], req: Req, new_accepted_len: int = 1) -> None:
    """Hook around ``Req.update_finish_state``: end the request at the first token at which SGLang's function ends it.

    Repeat the tokens one by one only if SGLang finds an end, or for a pattern, whose match may depend on where the text
    is cut. ``output_ids`` and the K/V cache hold the tokens after the end too.
    """
    if new_accepted_len <= 1 or req.finished() or req.to_finish:
        original(req, new_accepted_len)
        return
    ids, grammar = req.output_ids, req.grammar
    start = len(ids) - new_accepted_len
    run = ids[start:]
    if not req.sampling_params.stop_regex_strs:
        original(req, new_accepted_len)
        if not req.finished():
            return
        req.finished_reason = req.finished_len = None
    del ids[start:]
    try:
        for token in run:
            ids.append(token)
            # the grammar has already read the whole run
            req.grammar = grammar if len(ids) == start + len(run) else None
            original(req, 1)
            if req.finished():
                _end_here(req)
                break
    finally:
        ids.extend(run[len(ids) - start :])
        req.grammar = grammar


def _end_here(req: Req) -> None:
    end = req.finished_len = len(req.output_ids) if req.finished_len is None else req.finished_len
    # SGLang has counted the whole run; thinking starts after a complete start marker
    req.reasoning_tokens = 0 if end < req._think_start_match_len else min(req.reasoning_tokens, end)


def forget_unseen_tokens(last_req: Req, *_: Any) -> None:
    """Hook before ``Session._concat_token_arrays``: continue a session with the tokens that its client received."""
    last_req.output_ids = last_req.output_ids_through_stop


def end_streaming_turn(original: Callable[..., bool], sessions: Any, req: Req) -> bool:
    """Hook around ``StreamingSession.try_cache_finished_req``: store only tokens that the next turn may continue.

    A recurrent state cannot be rewound: release the turn to the prefix cache. On other targets drop the last token,
    whose K/V may not exist yet.
    """
    slot = sessions.borrowed_slot(req)
    if slot is None or isinstance(req.finished_reason, FINISH_ABORT):
        return original(sessions, req)
    if sessions.cache.supports_mamba():
        del sessions.slots[req.session.session_id]
        req.lock, slot.lock = slot.lock, None
        if req.finished():  # a retracted request restarts from its prompt
            forget_unseen_tokens(req)
            req.session.finish_req(req)
        return False
    written = req.kv.kv_committed_len
    kept = original(sessions, req)
    slot.kv.kv_committed_len = min(slot.kv.kv_committed_len, written)
    return kept


def is_prefill_only(req: Req) -> bool:
    """Whether no token is sampled; under speculation SGLang samples one if a request has ``max_new_tokens`` 0.

    A grammar reads the token in place of a sample, 0, and would refuse it.
    """
    return req.sampling_params.max_new_tokens == 0 and req.grammar is None


HOOKS = Hooks(
    before={"session.session_controller.Session._concat_token_arrays": forget_unseen_tokens},
    around={
        "speculative.dflash_utils.validate_dflash_request": refuse_request,
        "speculative.spec_sampling_mask.validate_spec_sampling_mask_request": refuse_mask,
        "managers.schedule_batch.Req.update_finish_state": end_at_first_token,
        "session.streaming_session.StreamingSession.try_cache_finished_req": end_streaming_turn,
    },
    after={"constrained.base_grammar_backend.create_grammar_backend": refuse_without_rollback},
    values={"managers.schedule_batch.Req.is_prefill_only": property(is_prefill_only)},
)
