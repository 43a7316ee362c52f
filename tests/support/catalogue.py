"""The catalogue of requests, by name: parameters of ``/generate``, bodies of chats, values that no sampler can use."""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.sampling import custom_logit_processor

from tests.fuzz.values import INF, NAN
from tests.support.chats import DIRECT

NEW_TOKENS = 48
_KEYS = {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99}}
OBJECT = {"type": "object", "properties": _KEYS, "required": [*_KEYS], "additionalProperties": False}
SCHEMA = json.dumps(OBJECT)
PENALTIES = {"repetition_penalty": 1.3, "frequency_penalty": -0.4, "presence_penalty": 0.8}


def processor(name: str) -> str:
    """A class of ``tests/plugin``, which the servers load, pickled by its name as SGLang's ``to_str`` writes one."""
    return json.dumps({"callable": f"cdflash_test_plugin.custom_processor\n{name}\n.".encode().hex()})


# Two of SGLang's own: one forbids what its parameters list, the other looks at what its request has generated.
PROCESSORS = {
    "custom processor": custom_logit_processor.DisallowedTokensLogitsProcessor.to_str(),
    "custom processor that looks back": custom_logit_processor.DeepseekOCRNoRepeatNGramLogitProcessor.to_str(),
    "custom processor with state": processor("BanByCalls"),
}


def parameters(commonest: list[int], middle: int, word: str) -> dict[str, dict[str, Any]]:
    """By kind of request, from the target's commonest tokens, and one of its answers with its text."""
    # The target is sure of the text it knows. Without its commonest tokens it is not, and a penalty changes its choice.
    unsure = {"logit_bias": {str(token): -60.0 for token in commonest}}
    return {
        "nothing special": {},
        "frequency penalty": {**unsure, "frequency_penalty": 1.2},
        "presence penalty": {**unsure, "presence_penalty": 1.7},
        "repetition penalty": {**unsure, "repetition_penalty": 1.6},
        "all penalties": {**unsure, **PENALTIES},
        "minimum length": {"min_new_tokens": NEW_TOKENS - 5},
        "minimum length and penalty": {**unsure, "min_new_tokens": NEW_TOKENS - 5, "frequency_penalty": 0.9},
        "logit bias": unsure,
        "stop token": {"stop_token_ids": [middle]},
        "stop string": {"stop": [word, "no such text"]},
        "end ignored": {"ignore_eos": True},
        "custom processor": {"custom_params": {"token_ids": [*commonest[:1], middle]}},
        "custom processor that looks back": {"custom_params": {"ngram_size": 2, "window_size": 40}},
        "custom processor with state": {"custom_params": {}},
        "json schema": {"json_schema": SCHEMA},
        "regex": {"regex": "[a-z]{3,10} (is|was) [0-9]{1,3}\\."},
        "ebnf": {"ebnf": 'root ::= "a" ("b" | "cd"){2,9} "e"'},
        "regex and penalty": {"regex": "[a-z ]{20,40}", "frequency_penalty": 1.0},
    }


TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": name, "parameters": {"type": "object", "properties": keys}},
    }
    for name, keys in (("add", {"a": {"type": "integer"}, "b": {"type": "integer"}}), ("now", {}))
]
ADD = r'<tool_call>\n\{"name": "add", "arguments": \{"a": 3, "b": [0-9][0-9]?\}\}\n</tool_call>'
NOW = r'<tool_call>\n\{"name": "now", "arguments": \{\}\}\n</tool_call>'
CALLS = {
    "one call": ADD,
    "two calls": rf"{ADD}\n{ADD}",
    "no arguments": NOW,
    "text and calls": rf"Let me see\.\n{ADD}\n{NOW}",
}
BODIES: dict[str, dict[str, Any]] = {
    "thoughts": {"max_tokens": 40},
    "cut thoughts": {"max_tokens": 3},
    "thoughts that end inside a block": {"logit_bias": {"5": 9.0}},  # </think>
    "ends": {**DIRECT, "stop": ["apples", "3", "has"]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": OBJECT}}},
    "forced call": {"tools": TOOLS[:1], "tool_choice": "required", "max_tokens": 60},
    **{name: {**DIRECT, "tools": TOOLS, "regex": text, "max_tokens": 200} for name, text in CALLS.items()},
}


def body_of(kind: str, question: str, **more: Any) -> dict[str, Any]:
    message = {"role": "user", "content": question}
    return {"model": "m", "messages": [message], "temperature": 0, "max_tokens": 48, **BODIES[kind], **more}


# A good request, those that once ended the scheduler, and merely unusual ones, for a vocabulary of VOCAB.
VOCAB = 16
GOOD: dict[str, Any] = {"temperature": 0.7, "top_k": 5, "logit_bias": {"3": -100.0}, "min_new_tokens": 2}
BAD: list[dict[str, Any]] = [
    {"top_k": 1 << 40}, {"top_k": NAN}, {"top_k": 2.0}, {"repetition_penalty": 1e-300}, {"temperature": 1e300},
    *({"logit_bias": {"3": value}} for value in (NAN, INF, 1e39, "much")),
    {"logit_bias": dict.fromkeys(map(str, range(VOCAB)), -INF)},
]  # fmt: skip
UNUSUAL: list[dict[str, Any]] = [
    {"top_k": -1}, {"stop_token_ids": [VOCAB]}, {"stop_token_ids": [-1, 1 << 63, 3], "min_new_tokens": 1},
    {"stop_token_ids": [2], "min_new_tokens": 3}, {"logit_bias": {"3": -INF, "4": 100.0}},
    {"repetition_penalty": 0.01, "frequency_penalty": 2.0}, {"temperature": 100.0, "min_p": 1.0, "top_p": 1e-300},
    {"temperature": 0.0, "sampling_seed": -(1 << 63)},
]  # fmt: skip
