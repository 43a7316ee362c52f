"""What may be asked: each entry is one request with one right answer."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from sglang_dflash_lab.bench.tasks import load
from sglang_dflash_lab.pairs.corpus import prompts
from tests.support.catalogue import BODIES, body_of
from tests.support.prompts import chat_ids, corpus, message_ids, schema_of

LONGEST_PROMPT, LONGEST_ANSWER = 1500, 96
REPEATED = ("edit-json", "edit-code", "edit-chat", "repeat")


@dataclass(frozen=True)
class Entry:
    """A request of ``route``; ``kind`` says what is special about it. ``turns`` follow in its session."""

    kind: str
    route: str
    body: dict[str, Any]
    turns: tuple[list[int], ...] = ()


def catalogue(size: int, kinds: Sequence[str], pair: str) -> list[Entry]:
    """``size`` entries of these kinds in turn, always the same ones."""
    sources = _Sources(Random(0), size, pair)
    return [KINDS[kind](sources) for kind in itertools.islice(itertools.cycle(kinds), size)]


class _Sources:
    """Prompts without end."""

    def __init__(self, random: Random, size: int, pair: str) -> None:
        self.random, self.pair = random, pair
        generator = torch.Generator().manual_seed(random.getrandbits(32))
        self.noise = torch.randint(3, 1000, (2 * LONGEST_PROMPT,), generator=generator).tolist()
        self.prefixes = [self.random_ids(length) for length in (64, 200, 500, 1000)]
        self.known = itertools.cycle(corpus(pair, size))
        asked = [messages for task in REPEATED for messages in load(task, -(-size // len(REPEATED)))]
        self.repeats = itertools.cycle(message_ids(pair, random.sample(asked, len(asked))))
        self.questions = itertools.cycle(prompts("json", n=size))

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
    return Entry("session", "/generate", first, later)


# By kind; sessions and chats twice as often as others.
KINDS: dict[str, Callable[[_Sources], Entry]] = {
    "known": _known, "random": _random, "shared": _shared, "repeated": _repeated, "schema": _schema, "tag": _tag,
    "chat": _chat, "session": _session,
}  # fmt: skip
PLAIN = ("known", "random", "shared", "repeated")
EVERYTHING = (*PLAIN, "random", "schema", "chat", "tag", "session", "chat", "session")
