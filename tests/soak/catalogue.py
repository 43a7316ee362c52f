"""What may be asked: each entry is one request with one right answer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch
from hypothesis import HealthCheck, given, seed, settings

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs import NAMES, target_path
from sglang_dflash_lab.pairs.corpus import Prompt, prompts
from tests.families.pairs import VOCAB
from tests.fuzz.test_requests import REQUEST
from tests.serving.test_images import CAT, DOG, LARGE, PLACEHOLDER, TALL, url
from tests.support.catalogue import BAD, BODIES, UNUSUAL, body_of
from tests.support.prompts import chat_ids, corpus, message_ids, schema_of

LONGEST_PROMPT, LONGEST_ANSWER = 1500, 96
REPEATED = ("edit-json", "edit-code", "edit-chat", "repeat")
SEEDED, HOSTILE = "seeded", "hostile"
MESSAGES, RESPONSES, OLLAMA = "/v1/messages", "/v1/responses", "/api/chat"
# What an agent's model said, by endpoint: text and thoughts, as the next turn repeats them.
SAID: dict[str, Callable[[Any], Any]] = {
    MESSAGES: lambda answer: answer["content"],
    RESPONSES: lambda answer: [part["text"] for item in answer["output"] for part in item.get("content") or ()],
    OLLAMA: lambda answer: answer["message"]["content"],
}


@dataclass(frozen=True)
class Entry:
    """A request of ``route``; ``kind`` says what is special about it. ``turns`` are what its client says afterwards."""

    kind: str
    route: str
    body: dict[str, Any]
    turns: tuple[Any, ...] = ()


def catalogue(size: int, kinds: Sequence[str], pair: str) -> list[Entry]:
    """``size`` entries of these kinds in turn, always the same ones."""
    sources = _Sources(Random(0), size, pair)
    return [KINDS[kind](sources) for kind in itertools.islice(itertools.cycle(kinds), size)]


class _Sources:
    """Prompts without end, and the seeds' generator. Only the shipped pairs have a text."""

    def __init__(self, random: Random, size: int, pair: str) -> None:
        self.random, self.pair = random, pair
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        low, high = (3, 1000) if pair in NAMES else (10, VOCAB - 10)
        self.noise = torch.randint(low, high, (2 * LONGEST_PROMPT,), generator=generator).tolist()
        self.prefixes = [self.random_ids(length) for length in (64, 200, 500, 1000)]
        if pair in NAMES:
            self.known = itertools.cycle(corpus(pair, size))
            asked = [messages for task in REPEATED for messages in load(task, -(-size // len(REPEATED)))]
            self.repeats = itertools.cycle(message_ids(pair, random.sample(asked, len(asked))))
            self.questions: Iterator[Prompt] = itertools.cycle(prompts("json", n=size))

    def random_ids(self, length: int) -> list[int]:
        start = self.random.randrange(LONGEST_PROMPT)
        return list(self.noise[start : start + length])

    def length(self, longest: int) -> int:
        """As many short as long ones: uniform in the logarithm."""
        return round(math.exp(self.random.uniform(0, math.log(longest))))

    def params(self, **more: Any) -> dict[str, Any]:
        return {"temperature": 0, "max_new_tokens": self.length(LONGEST_ANSWER), **more}


def _generate(kind: str, ids: list[int], params: dict[str, Any]) -> Entry:
    return Entry(kind, "/generate", {"input_ids": ids, "sampling_params": params})


def _known(sources: _Sources) -> Entry:
    return _generate("known", next(sources.known), sources.params())


def _random(sources: _Sources) -> Entry:
    ids = sources.random_ids(sources.length(LONGEST_PROMPT))
    return _generate("random", ids, sources.params(ignore_eos=True))


def _shared(sources: _Sources) -> Entry:
    prefix = sources.random.choice(sources.prefixes)
    return _generate("shared prefix", prefix + sources.random_ids(sources.length(100)), sources.params(ignore_eos=True))


def _repeated(sources: _Sources) -> Entry:
    return _generate("repeated", next(sources.repeats), sources.params())


def _seeded(sources: _Sources) -> Entry:
    """With filters: in deterministic mode a seed without them depends on the batch (docs/internals/exact.md)."""
    ids = next(sources.known) if sources.random.random() < 0.5 else sources.random_ids(sources.length(300))
    chosen = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "sampling_seed": sources.random.getrandbits(30)}
    return _generate(SEEDED, ids, sources.params(**chosen))


def _schema(sources: _Sources) -> Entry:
    prompt = next(sources.questions)
    return _generate("schema", chat_ids(sources.pair, [prompt])[0], sources.params(json_schema=schema_of(prompt)))


def _chat(sources: _Sources) -> Entry:
    question = next(sources.questions).messages[0]["content"]
    kind, streamed = sources.random.choice([*BODIES]), {"stream": True, "stream_options": {"include_usage": True}}
    more = streamed if sources.random.random() < 0.5 else {}
    return Entry(kind, "/v1/chat/completions", body_of(kind, question, **more))


def _tag(sources: _Sources) -> Entry:
    """The answer begins with a brace, which the tag makes a pair of braces around JSON."""
    prompt = next(sources.questions)
    tag = {"begin": "{", "schema": json.loads(schema_of(prompt)), "end": "}"}
    tag_format = json.dumps({"type": "structural_tag", "structures": [tag], "triggers": ["{"]})
    return _generate("structural tag", chat_ids(sources.pair, [prompt])[0], sources.params(structural_tag=tag_format))


def _session(sources: _Sources) -> Entry:
    later = tuple(sources.random_ids(sources.length(30)) for _ in range(2))
    first = {"input_ids": next(sources.known), "sampling_params": sources.params(ignore_eos=True)}
    return Entry("session", "/generate", {**first, "session_params": {}}, later)


def _agent(sources: _Sources) -> Entry:
    route = sources.random.choice([*SAID])
    first, *later = (next(sources.questions).messages[0]["content"] for _ in range(3))
    message = [{"role": "user", "content": first}]
    # SGLang renames the model to its folder when weights are loaded
    body: dict[str, Any] = {"model": str(target_path(sources.pair)), "temperature": 0, "max_tokens": 40}
    body |= {"input": message, "max_output_tokens": 40} if route == RESPONSES else {"messages": message}
    body |= {"options": {"temperature": 0, "num_predict": 40}, "stream": False} if route == OLLAMA else {}
    return Entry(route, route, body, tuple(later))


def _image(sources: _Sources) -> Entry:
    seen = [sources.random.choice((CAT, DOG, TALL, LARGE)) for _ in range(sources.random.choice((0, 1, 1, 2)))]
    text = PLACEHOLDER * len(seen) + "What is it? " * sources.length(20)
    body = {"text": text, "image_data": [url(image) for image in seen]}
    return Entry("image", "/generate", {**body, "sampling_params": sources.params(ignore_eos=True)})


def _hostile(sources: _Sources) -> Entry:
    params = {**sources.params(), **sources.random.choice(hostile_parameters())}
    return _generate(HOSTILE, sources.random_ids(20), params)


@cache
def hostile_parameters() -> list[dict[str, Any]]:
    found = [*BAD, *UNUSUAL]

    @seed(0)
    @settings(max_examples=200, database=None, suppress_health_check=list(HealthCheck))
    @given(REQUEST)
    def collect(drawn: dict[str, Any]) -> None:
        found.append({**drawn, "max_new_tokens": 20} if drawn.get("max_new_tokens") is None else drawn)

    collect()
    return found


# By kind; chats three times as often as others.
KINDS: dict[str, Callable[[_Sources], Entry]] = {
    "known": _known, "random": _random, "shared": _shared, SEEDED: _seeded, "repeated": _repeated, "schema": _schema,
    "tag": _tag, "chat": _chat, "session": _session, "agent": _agent, "image": _image, HOSTILE: _hostile,
}  # fmt: skip
PLAIN = ("known", "random", "shared", "repeated")
EVERYTHING = (*PLAIN, SEEDED, "random", "schema", "chat", "tag", "agent", "session", "chat", "agent")
