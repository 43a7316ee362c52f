"""Streamed answers: clients receive what they would receive with one token per step.

With several, SGLang's detokenizer sends text twice and its parsers lose calls. One difference remains: with byte
fallback, an answer that is cut inside a character loses the other characters of an invalid run of byte tokens.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from itertools import accumulate, chain, pairwise
from typing import Any

from sglang_dflash.plan.serving import ServingPlan
from sglang_dflash.upstream import read_record
from sglang_dflash.upstream.hooks import Hooks
from sglang_dflash.upstream.launch import get_server_args

BYTES = 4  # per character
CONTEXT = 6  # preceding tokens that decoding may depend on

_tokenizer: Any = None
_marker_or_character = re.compile(".", re.DOTALL)
_answer: ContextVar[dict[str, Any] | None] = ContextVar("_answer", default=None)


def send_once(original: Callable[..., list[str]], manager: Any, batch: Any) -> list[str]:
    """Hook around ``DetokenizerManager._decode_batch_token_id_output``: never send text twice.

    SGLang may move the end of sent text back.
    """
    status = manager.decode_status
    sent = {rid: status[rid].sent_offset for rid in batch.rids if rid in status} if _we_serve() else {}
    texts = original(manager, batch)
    for rid, offset in sent.items():
        if rid in status:
            status[rid].sent_offset = max(offset, status[rid].sent_offset)
    return texts


def keep_tokenizer(_: None, manager: Any) -> None:
    """Hook after ``TokenizerManager.init_tokenizer_and_processor``: keep its tokenizer."""
    global _tokenizer, _marker_or_character
    _tokenizer = manager.tokenizer
    added = sorted(filter(None, getattr(_tokenizer, "get_added_vocab", dict)()), key=len, reverse=True)
    _marker_or_character = re.compile("|".join([*map(re.escape, added), "."]), re.DOTALL)


def mark_whole(parser: Any, *_: Any, **__: Any) -> None:
    """Hook before ``FunctionCallParser.parse_non_stream``, which may pass a whole answer to ``parse_stream_chunk``."""
    parser.reads_whole_answer = True


async def remember(original: Callable[..., AsyncGenerator[Any]], *args: Any, **keywords: Any) -> AsyncIterator[Any]:
    """Hook around ``TokenizerManager.generate_request``: keep each answer for its parsers."""
    async with aclosing(original(*args, **keywords)) as answers:
        async for answer in answers:
            _answer.set(answer)
            yield answer


def parse(original: Callable[..., Any], parser: Any, text: str, *tools: Any) -> Any:
    """Hook around each parser's method for streamed text: call it for one token at a time.

    Returns the joined results, with consecutive argument deltas of one call merged.
    """
    at_once = hasattr(parser, "reads_whole_answer") or _tokenizer is None or not _we_serve()
    ends = set() if at_once else _ends_of_tokens(text)
    pieces = [text[start:end] for start, end in pairwise(sorted({0, *ends, len(text)}))] or [text]
    results = [original(parser, piece, *tools) for piece in pieces]
    if isinstance(results[0], tuple):
        return tuple(map(_joined, zip(*results, strict=True)))
    return results[-1].model_copy(
        update={name: _joined([getattr(result, name) for result in results]) for name in ("normal_text", "calls")}
    )


def _we_serve() -> bool:
    return isinstance(read_record(get_server_args()), ServingPlan)


def _ends_of_tokens(text: str) -> set[int]:
    """Where tokens end in ``text``, else markers and characters."""
    ids = (_answer.get() or {}).get("output_ids") or []
    for skips in (False, True):
        pieces: list[str] = []
        for k in reversed(range(max(0, len(ids) - BYTES * len(text) - CONTEXT), len(ids))):
            # as in the detokenizer: a token that ends inside a character adds no text
            before, after = (
                _tokenizer.decode(ids[max(0, k - CONTEXT) : end], skip_special_tokens=skips).rstrip("\ufffd")
                for end in (k, k + 1)
            )
            pieces.insert(0, after[len(before) :])
            if (start := "".join(pieces).find(text)) >= 0:
                return {end - start for end in accumulate(map(len, pieces)) if 0 < end - start < len(text)}
    return {match.end() for match in _marker_or_character.finditer(text)}


def _joined(parts: Any) -> Any:
    if not isinstance(parts[0], list):
        return "".join(filter(None, parts)) or parts[-1]
    calls: list[Any] = []
    for call in chain.from_iterable(parts):
        if calls and not (call.name or calls[-1].name) and call.tool_index == calls[-1].tool_index:
            call = call.model_copy(update={"parameters": calls.pop().parameters + call.parameters})
        calls.append(call)
    return calls


_TOOLS, _TOKENIZER = (
    "function_call.function_call_parser.FunctionCallParser",
    "managers.tokenizer_manager.TokenizerManager",
)
TOKENIZER_HOOKS = Hooks(
    before={f"{_TOOLS}.parse_non_stream": mark_whole},
    around={
        f"{_TOKENIZER}.generate_request": remember,
        f"{_TOOLS}.parse_stream_chunk": parse,
        "function_call.json_array_parser.JsonArrayParser.parse_streaming_increment": parse,
        "parser.reasoning_parser.ReasoningParser.parse_stream_chunk": parse,
    },
    after={f"{_TOKENIZER}.init_tokenizer_and_processor": keep_tokenizer},
)
DETOKENIZER_HOOKS = Hooks(
    around={"managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output": send_once}
)
