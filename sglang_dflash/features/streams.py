"""Streamed answers: clients receive what they would receive with one token per step.

With several, SGLang's detokenizer sends text twice and its parsers lose calls. One difference remains: with byte
fallback, an answer that is cut inside a character loses the other characters of an invalid run of byte tokens.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from functools import cache
from itertools import accumulate, chain, pairwise
from typing import Any

from sglang_dflash.upstream.hooks import Hooks

BYTES = 4  # per character
CONTEXT = 6  # preceding tokens that decoding may depend on

_answer: ContextVar[tuple[Any, dict[str, Any]]] = ContextVar("_answer", default=(None, {}))  # and the tokenizer


def send_once(original: Callable[..., list[str]], manager: Any, batch: Any) -> list[str]:
    """Hook around ``DetokenizerManager._decode_batch_token_id_output``: never send text twice.

    SGLang may move the end of sent text back.
    """
    status = manager.decode_status
    sent = {rid: status[rid].sent_offset for rid in batch.rids if rid in status}
    texts = original(manager, batch)
    for rid, offset in sent.items():
        if rid in status:
            status[rid].sent_offset = max(offset, status[rid].sent_offset)
    return texts


def mark_whole(parser: Any, *_: Any, **__: Any) -> None:
    """Hook before ``FunctionCallParser.parse_non_stream``, which may pass a whole answer to ``parse_stream_chunk``."""
    parser.reads_whole_answer = True


async def remember(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, *args: Any, **keywords: Any
) -> AsyncIterator[Any]:
    """Hook around ``TokenizerManager.generate_request``: keep each answer for its parsers."""
    async with aclosing(original(manager, *args, **keywords)) as answers:
        async for answer in answers:
            _answer.set((manager.tokenizer, answer))
            yield answer


def parse(original: Callable[..., Any], parser: Any, text: str, *tools: Any) -> Any:
    """Hook around each parser's method for streamed text: call it for one token at a time.

    Returns the joined results, with consecutive argument deltas of one call merged.
    """
    tokenizer, answer = _answer.get()
    at_once = hasattr(parser, "reads_whole_answer") or tokenizer is None
    ends = set() if at_once else _ends_of_tokens(text, tokenizer, answer.get("output_ids") or [])
    pieces = [text[start:end] for start, end in pairwise(sorted({0, *ends, len(text)}))] or [text]
    results = [original(parser, piece, *tools) for piece in pieces]
    if isinstance(results[0], tuple):
        return tuple(map(_joined, zip(*results, strict=True)))
    return results[-1].model_copy(
        update={name: _joined([getattr(result, name) for result in results]) for name in ("normal_text", "calls")}
    )


def _ends_of_tokens(text: str, tokenizer: Any, ids: list[int]) -> set[int]:
    """Where tokens end in ``text``, else markers and characters."""
    for skips in (False, True):
        pieces: list[str] = []
        for k in reversed(range(max(0, len(ids) - BYTES * len(text) - CONTEXT), len(ids))):
            # as in the detokenizer: a token that ends inside a character adds no text
            before, after = (
                tokenizer.decode(ids[max(0, k - CONTEXT) : end], skip_special_tokens=skips).rstrip("\ufffd")
                for end in (k, k + 1)
            )
            pieces.insert(0, after[len(before) :])
            if (start := "".join(pieces).find(text)) >= 0:
                return {end - start for end in accumulate(map(len, pieces)) if 0 < end - start < len(text)}
    return {match.end() for match in _marker_or_character(tokenizer).finditer(text)}


@cache
def _marker_or_character(tokenizer: Any) -> re.Pattern[str]:
    added = sorted(filter(None, getattr(tokenizer, "get_added_vocab", dict)()), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, added), "."]), re.DOTALL)


def _joined(parts: Any) -> Any:
    if not isinstance(parts[0], list):
        return "".join(filter(None, parts)) or parts[-1]
    calls: list[Any] = []
    for call in chain.from_iterable(parts):
        if calls and not (call.name or calls[-1].name) and call.tool_index == calls[-1].tool_index:
            call = call.model_copy(update={"parameters": calls.pop().parameters + call.parameters})
        calls.append(call)
    return calls


_TOOLS = "function_call.function_call_parser.FunctionCallParser"
DETOKENIZER_HOOKS = Hooks(
    around={"managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output": send_once}
)
TOKENIZER_HOOKS = Hooks(
    before={f"{_TOOLS}.parse_non_stream": mark_whole},
    around={
        "managers.tokenizer_manager.TokenizerManager.generate_request": remember,
        f"{_TOOLS}.parse_stream_chunk": parse,
        "function_call.json_array_parser.JsonArrayParser.parse_streaming_increment": parse,
        "parser.reasoning_parser.ReasoningParser.parse_stream_chunk": parse,
    },
)
