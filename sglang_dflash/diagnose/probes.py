"""The probes: few short prompts each, which differ from the reference probe in one thing."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from sglang_dflash.diagnose.answers import NAN, RequestRecord, RunKey, accept_length_macro, closed_loop, record
from sglang_dflash.diagnose.client import Client, Message, Sampling
from sglang_dflash.diagnose.questions import Question, all_questions, notes
from sglang_dflash.errors import DFlashError

FEW, USERS = 4, 8
_CHARACTERS = 4  # of a token of English, about
_WARM_UP = 8  # tokens


@dataclass(frozen=True)
class Probe:
    """A probe and, once it has run, its answers.

    Attributes:
        name: of the thing.
        template: whether prompts go through the chat template.
        thinking: the template's switch; None leaves it alone.
        change: the flag or request field that ends what this probe differs in.
        requests: answers; the width of each is known.
    """

    name: str
    questions: tuple[Question, ...]
    template: bool = True
    thinking: bool | None = None
    temperature: float = 0.0
    users: int = 1
    change: str = ""
    requests: tuple[RequestRecord, ...] = ()

    def of(self, *tasks: str) -> list[RequestRecord]:
        """The answers to these tasks' questions; to all without one."""
        return [r for r in self.requests if not tasks or r.question.partition("/")[0] in tasks]

    def accept_length(self, *tasks: str) -> float:
        """Tokens per verify step, the mean over answers, as the cards count it; NaN if no answer took a step."""
        return accept_length_macro(self.of(*tasks))

    @property
    def width(self) -> float:
        """Mean positions of a verified block; NaN if there was none."""
        steps = sum(r.verify_steps for r in self.requests)
        return sum((r.width or 0) * r.verify_steps for r in self.requests) / steps if steps else NAN

    @property
    def at_once(self) -> float:
        """Mean number of requests being answered: their latencies over the time that all took (Little's law)."""
        wall = max(r.start_s + r.latency_s for r in self.requests)
        return sum(r.latency_s for r in self.requests) / wall


async def plan(client: Client, thinking: bool | None, long_tokens: int) -> list[Probe]:
    """The probes that this server can answer.

    Args:
        thinking: what the drafter was measured with; None takes the template's default.
        long_tokens: of the long prompts, about.
    """
    questions = all_questions()
    raw = Probe(
        "raw prompts", questions, template=False, change="POST /v1/chat/completions, or render the chat template"
    )
    first, others = raw, []
    renders, switch = await _template(client, questions[0])
    if renders:
        thinking = switch if thinking is None else thinking
        first = Probe("chat template", questions, thinking=None if switch is None else thinking)
        if switch is not None:
            change = f'"chat_template_kwargs": {{"enable_thinking": {json.dumps(thinking)}}}'
            name = "thinking off" if thinking else "thinking on"
            others.append(replace(first, name=name, thinking=not thinking, change=change))
        context = tuple(_with_notes(question, long_tokens) for question in questions)
        others += [
            raw,
            replace(first, name="temperature 1", temperature=1.0, change='"temperature": 0'),
            replace(first, name="long context", questions=context, change="--speculative-draft-window-size"),
        ]
    together = replace(first, name=f"{USERS} users at once", questions=questions[:USERS], users=USERS)
    return [first, *(replace(other, questions=other.questions[:FEW]) for other in others), together]


async def run(client: Client, probe: Probe, block: int, max_tokens: int, say: Callable[[str], None]) -> Probe:
    """Ask a probe's questions -> the probe with its answers."""
    say(f"{probe.name}: {len(probe.questions)} prompts")
    asked = [(question.id, await _render(client, probe, question)) for question in probe.questions]
    sampling, brief = Sampling(max_tokens, probe.temperature), Sampling(_WARM_UP, probe.temperature)
    await asyncio.gather(*(client.generate(ids, brief) for _, ids in asked[: probe.users]))
    key, start = RunKey(probe.name, "", probe.users, 0), time.perf_counter()
    answers: list[RequestRecord] = []

    async def ask(question: tuple[str, list[int]]) -> None:
        sent_s = time.perf_counter() - start
        answer = record(key, question[0], 0, question[1], sent_s, await client.generate(question[1], sampling))
        answers.append(replace(answer, width=answer.width or block))

    await closed_loop(asked, probe.users, ask)
    return replace(probe, requests=tuple(answers))


async def _render(client: Client, probe: Probe, question: Question) -> list[int]:
    if probe.template:
        return await client.tokenize(list(question.messages), probe.thinking)
    # The newline leads into an answer: without it, a model may end right after the question.
    return await client.tokenize_text("".join(f"{message['content']}\n" for message in question.messages))


async def _template(client: Client, question: Question) -> tuple[bool, bool | None]:
    """Whether the server has a chat template, and the default of its thinking switch; None if it has no switch."""
    try:
        default, on, off = [await client.tokenize(list(question.messages), value) for value in (None, True, False)]
    except DFlashError as error:
        if "answered 400" in error.value:
            return False, None
        raise
    return True, None if on == off else default == on


def _with_notes(question: Question, tokens: int) -> Question:
    """The question after a system message of about so many tokens."""
    system: Message = {"role": "system", "content": notes(tokens * _CHARACTERS)}
    return replace(question, messages=(system, *question.messages))
