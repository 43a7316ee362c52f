"""What may be asked: each entry is one request with one right answer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs.corpus import Prompt, prompts
from tests.serving.test_chats import BODIES, body_of
from tests.support.prompts import chat_ids, corpus, message_ids, schema_of

PAIR = "tiny-hybrid"
LONGEST_PROMPT, LONGEST_ANSWER = 1500, 96
REPEATED = ("edit-json", "edit-code", "edit-chat", "repeat")
CHATS = [kind for kind, body in BODIES.items() if "logprobs" not in body]  # which rounding changes
SEEDED = "seeded"


@dataclass(frozen=True)
class Entry:
    """A request of ``route``; ``kind`` says what is special about it."""

    kind: str
    route: str
    body: dict[str, Any]


def catalogue(size: int) -> list[Entry]:
    """``size`` entries of all kinds, always the same ones."""
    kinds = itertools.cycle((_known, _random, _shared, _seeded, _repeated, _known, _random, _schema, *3 * [_chat]))
    sources = _Sources(Random(0), size)
    return [kind(sources) for kind in itertools.islice(kinds, size)]


class _Sources:
    """Prompts without end, and the seeds' generator."""

    def __init__(self, random: Random, size: int) -> None:
        self.random = random
        self.known = itertools.cycle(corpus(PAIR, size))
        asked = [messages for task in REPEATED for messages in load(task, -(-size // len(REPEATED)))]
        self.repeats = itertools.cycle(message_ids(PAIR, random.sample(asked, len(asked))))
        self.questions: Iterator[Prompt] = itertools.cycle(prompts("json", n=size))
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        self.noise = torch.randint(3, 1000, (2 * LONGEST_PROMPT,), generator=generator).tolist()
        self.prefixes = [self.random_ids(length) for length in (64, 200, 500, 1000)]

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
    ids = next(sources.known) if sources.random.random() < 0.5 else sources.random_ids(sources.length(300))
    chosen = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "sampling_seed": sources.random.getrandbits(30)}
    return _generate(SEEDED, ids, sources.params(**chosen))


def _schema(sources: _Sources) -> Entry:
    prompt = next(sources.questions)
    return _generate("schema", chat_ids(PAIR, [prompt])[0], sources.params(json_schema=schema_of(prompt)))


def _chat(sources: _Sources) -> Entry:
    question = next(sources.questions).messages[0]["content"]
    kind, streamed = sources.random.choice(CHATS), {"stream": True, "stream_options": {"include_usage": True}}
    more = streamed if sources.random.random() < 0.5 else {}
    return Entry(kind, "/v1/chat/completions", body_of(kind, question, **more))
