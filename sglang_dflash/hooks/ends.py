"""Where a request ends: at the token at which plain decoding ends it, though a step commits several.

SGLang looks for an end in all tokens of a step at once, in an order of kinds: strings in the order of the request's
list, then patterns, then tokens. Plain decoding asks the same function after every token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash.plan import serving
from sglang_dflash.upstream.worker import FINISH_ABORT

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import Req


def end_at_first_token(original: Callable[..., None], req: Req, new_accepted_len: int = 1) -> None:
    """Hook around ``Req.update_finish_state``: end the request at the first token at which SGLang's function ends it.

    The tokens of a step are replayed one by one only if SGLang finds an end in them, or if the request has a pattern,
    whose match may depend on where the text before it is cut. Tokens after the end stay in ``output_ids``, because the
    K/V cache holds them; ``finished_len`` excludes them.
    """
    if serving.plan is None or new_accepted_len <= 1 or req.finished() or req.to_finish:
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
            # The grammar has read the whole run, which ends where the grammar does.
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
    # SGLang has counted the whole run. Thinking starts at the first token, after a start marker that must be whole.
    req.reasoning_tokens = 0 if end < req._think_start_match_len else min(req.reasoning_tokens, end)


def forget_unseen_tokens(last_req: Req, *_: Any) -> None:
    """Hook before ``Session._concat_token_arrays``: continue a session with the tokens that its client has seen."""
    if serving.plan is not None:
        last_req.output_ids = last_req.output_ids_through_stop


def keep_streaming_turn(original: Callable[..., bool], sessions: Any, req: Req) -> bool:
    """Hook around ``StreamingSession.try_cache_finished_req``: keep only what a next turn may build on.

    A recurrent state cannot be rewound to the end that the client saw: release the turn to the prefix cache, where the
    next turn finds it. Of other targets SGLang also keeps the last token, whose K/V may not exist yet.
    """
    slot = None if serving.plan is None else sessions.borrowed_slot(req)
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
