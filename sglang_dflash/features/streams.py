"""Streamed answers: SGLang's endpoints and parsers read one chunk per token, as plain decoding sends them.

Parsers decide by chunks, not by text. The detokenizer decodes a step token by token, and the tokenizer's process cuts
the answer where plain decoding sends a chunk. With byte fallback, text that is not streamed still depends on the steps.
"""

from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from sglang.srt.managers.io_struct import unwrap_from_pickle, wrap_as_pickle
from sglang.srt.parser.reasoning_parser import ReasoningParser
from sglang.srt.runtime_context import get_serving

from sglang_dflash.upstream.hooks import Hooks

LENGTHS = "sglang_dflash_lengths"  # in a message's ``customized_info``: per request, of each token's text

_FLAGS = ("no_stop_trim", "skip_special_tokens", "spaces_between_special_tokens")
_DECODED = ("rids", "decoded_texts", "read_offsets", *_FLAGS)
_COUNTS = "completion_tokens", "output_token_logprobs_length", "output_token_sampling_mask_length"
_GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")


def mark_streams(payload: Any, accumulator: Any, **_: Any) -> None:
    """Hook after ``_GenerationStreamAccumulator.to_payload``: mark the requests whose answers are streamed."""
    streamed = [req.stream for req in accumulator.output_reqs]
    if any(streamed) and not get_serving().skip_tokenizer_init:
        payload.customized_info = wrap_as_pickle({**accumulator.customized_info, LENGTHS: streamed})


def decode_by_token(original: Callable[..., list[str]], manager: Any, recv_obj: Any) -> list[str]:
    """Hook around ``DetokenizerManager._decode_batch_token_id_output``: decode streamed requests token by token.

    Writes the length of each token's text to the message. Lengths include what a stop string cuts off the result.
    """
    status, info = manager.decode_status, unwrap_from_pickle(recv_obj.customized_info) or {}
    streamed = info.get(LENGTHS) or [False] * len(recv_obj.rids)
    parts = [
        [ids[: len(ids) - len(new) + 1], *([token] for token in new[1:])] if cut and new else [ids]
        for ids, new, cut in zip(recv_obj.decode_ids, recv_obj.output_ids, streamed, strict=True)
    ]
    texts: list[list[str]] = [[] for _ in parts]
    sent = [status[rid].sent_offset if rid in status else 0 for rid in recv_obj.rids]
    states: dict[str, Any] = {}
    for n in range(max(map(len, parts), default=0)):
        rows = [i for i, part in enumerate(parts) if n < len(part)]
        batch = SimpleNamespace(**{name: [getattr(recv_obj, name)[i] for i in rows] for name in _DECODED})
        batch.decode_ids = [parts[i][n] for i in rows]
        batch.finished_reasons = [recv_obj.finished_reasons[i] if n == len(parts[i]) - 1 else None for i in rows]
        for i, text in zip(rows, _decode_once(original, manager, batch), strict=True):
            texts[i].append(text)
        states |= {rid: status[rid] for rid in batch.rids if rid in status}  # SGLang drops finished ones
    if LENGTHS in info:  # SGLang also sends a request without new tokens, if it drops the step of a preempted one
        lengths = [[*map(len, each)] if new else [] for each, new in zip(texts, recv_obj.output_ids, strict=True)]
        recv_obj.customized_info = wrap_as_pickle({**info, LENGTHS: lengths})
    whole = zip(recv_obj.rids, texts, sent, strict=True)
    return ["".join(each)[: states[rid].sent_offset - start if len(each) > 1 else None] for rid, each, start in whole]


def _decode_once(original: Callable[..., list[str]], manager: Any, batch: Any) -> list[str]:
    """Decode once. SGLang may move the end of sent text back, and would send text twice."""
    status = manager.decode_status
    sent = {rid: status[rid].sent_offset for rid in batch.rids if rid in status}
    texts = original(manager, batch)
    for rid in sent.keys() & status.keys():
        status[rid].sent_offset = max(sent[rid], status[rid].sent_offset)
    return texts


def store_lengths(
    original: Callable[..., None], manager: Any, meta_info: Any, state: Any, customized_info: Any, *row: Any
) -> None:
    """Hook around ``TokenizerManager.update_request_meta_info``: store the lengths of tokens, which no client sees."""
    others = {**customized_info}
    if lengths := others.pop(LENGTHS, None):
        state.customized_info_accumulated.setdefault(LENGTHS, []).extend(lengths[row[0]])
    original(manager, meta_info, state, others, *row)


async def cut(
    original: Callable[..., AsyncGenerator[Any]], manager: Any, obj: Any, state: Any, request: Any = None
) -> AsyncGenerator[Any]:
    """Hook around ``TokenizerManager._stream_one_response``: yield the chunks of plain decoding.

    A client that only concatenates text gets one chunk per step.
    """
    whole = not getattr(obj, "stream", False) or manager.skip_tokenizer_init or _joins_chunks(obj, request)
    cutter = None if whole else _Cutter(manager, obj, state)
    async with aclosing(original(manager, obj, state, request)) as answers:
        async for answer in answers:
            for chunk in (answer,) if cutter is None else cutter.chunks(answer):
                yield chunk


def _joins_chunks(obj: Any, request: Any) -> bool:
    if request is None:  # the Python engine; a stored answer of the Responses endpoint has no request either
        return not obj.background
    path, serving = getattr(request, "scope", {}).get("path"), get_serving()
    if path in ("/v1/chat/completions", "/v1/completions"):
        grammar = any(map(obj.sampling_params.get, _GRAMMARS))
        return not (serving.tool_call_parser or serving.reasoning_parser or grammar or obj.return_logprob)
    return bool(path == "/generate")


@lru_cache(1)
def _start_tag(parser: str | None, tokenizer: Any) -> int:
    """Return how many tokens the tag has with which a model starts a thought; 0 if the parser counts none."""
    if not parser:
        return 0
    detector = ReasoningParser(model_type=parser, stream_reasoning=False, tokenizer=tokenizer).detector
    return len(detector.get_self_opened_think_start_token_ids(tokenizer) or ())


class _Cutter:
    """Cuts the answers of one request where plain decoding would have sent a chunk."""

    def __init__(self, manager: Any, obj: Any, state: Any) -> None:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.managers.tokenizer_manager import _INCREMENTAL_STREAMING_META_INFO_KEYS

        self._obj, self._state, self._incremental = obj, state, manager.incremental_streaming_output
        self._req = object.__new__(Req)  # with the attributes that the scheduler reads before it sends a token
        self._req.tokenizer = manager.tokenizer
        self._req.sampling_params = manager.sampling_params_class(
            **{**(manager.preferred_sampling_params or {}), **obj.sampling_params}
        )
        self._req.sampling_params.normalize(manager.tokenizer)
        # SGLang counts no thought before the whole tag
        self._tag = 0 if obj.require_reasoning else _start_tag(get_serving().reasoning_parser, manager.tokenizer)
        self._interval = self._req.sampling_params.stream_interval or get_serving().stream_interval
        self._per_token = _INCREMENTAL_STREAMING_META_INFO_KEYS
        self._sent = 0  # tokens
        self._ends = [0]  # lengths of the text of the first n tokens

    def chunks(self, answer: Any) -> Iterator[Any]:
        count = answer["meta_info"]["completion_tokens"]
        lengths = self._state.customized_info_accumulated.get(LENGTHS, ())
        for n in range(len(self._ends), count + 1):
            self._ends.append(self._ends[-1] + lengths[n - 1])
            if n < count and self._due(n):
                yield self._chunk(answer, n)
        if answer["meta_info"]["finish_reason"] or self._due(count):
            yield self._chunk(answer, count) if self._sent < count else answer

    def _due(self, n: int) -> bool:
        """Return whether a chunk ends here, as ``_GenerationStreamAccumulator.accept`` decides after each token."""
        if not (n - self._sent >= self._interval or self._sent == 0 < n):
            return False
        if self._req.sampling_params.stop_strs:
            self._req.output_ids = self._state.output_ids[:n]
        return not self._req.check_match_stop_str_prefix()

    def _chunk(self, answer: Any, n: int) -> Any:
        start, meta, state = self._sent if self._incremental else 0, {**answer["meta_info"]}, self._state
        if n < meta["completion_tokens"]:
            thoughts = 0 if n < self._tag else min(meta.get("reasoning_tokens", 0), n)
            meta |= {"finish_reason": None, "reasoning_tokens": thoughts}
            meta |= {key: n for key in _COUNTS if key in meta}
            states = meta.pop("hidden_states", None)
            if states and self._obj.return_hidden_states is True:
                meta["hidden_states"] = states[:n]
        lists = {name: getattr(state, name) for name in self._per_token} | state.customized_info_accumulated
        meta |= {name: values[start:n] for name, values in lists.items() if name in meta}
        self._sent = n
        text, ids = state.get_text()[self._ends[start] : self._ends[n]], state.output_ids[start:n]
        return {**answer, "text": text, "output_ids": ids, "meta_info": meta}


_STREAMER = "managers.scheduler_components.output_streamer._GenerationStreamAccumulator"
_TOKENIZER = "managers.tokenizer_manager.TokenizerManager"
HOOKS = Hooks(after={f"{_STREAMER}.to_payload": mark_streams})
DETOKENIZER_HOOKS = Hooks(
    around={"managers.detokenizer_manager.DetokenizerManager._decode_batch_token_id_output": decode_by_token}
)
TOKENIZER_HOOKS = Hooks(
    around={f"{_TOKENIZER}.update_request_meta_info": store_lengths, f"{_TOKENIZER}._stream_one_response": cut}
)
