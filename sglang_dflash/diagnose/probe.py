"""Measurements of a running server: its configuration and counters, and probes of a few short prompts each."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

from sglang_dflash.causes import CONTEXT, NO_TEMPLATE, QUANTISED_DRAFTER, QUANTISED_TARGET, SAMPLING, THINKING, Cause
from sglang_dflash.diagnose.client import WORKER_KEY, Client, Generation, Message
from sglang_dflash.errors import DFlashError
from sglang_dflash.plan.pools import RAISED_BY

PROMPTS: dict[str, list[str]] = json.loads(Path(__file__).with_name("questions.json").read_text())
QUESTIONS = tuple((task, prompts[number]) for number in range(3) for task, prompts in PROMPTS.items())
_NAMES = ("Ava", "Ben", "Cleo", "Dan", "Grace", "Kira", "Noah", "Quinn", "Rosa", "Zoe")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_COLORS = ("black", "blue", "green", "red", "white", "yellow")
_THINGS = ("bell", "book", "coin", "kite", "map", "shell")
_FEW, _USERS = 4, 8  # questions of a variation; concurrent users of the last probe
_CHARACTERS_PER_TOKEN = 4
_WARM_UP = 8  # tokens

_QUANTISED = {QUANTISED_TARGET: "quantization", QUANTISED_DRAFTER: "speculative_draft_model_quantization"}
_POOL_SIZES = ("--max-mamba-cache-size", "--max-total-tokens")


@dataclass(frozen=True)
class Server:
    """A DFLASH server.

    Attributes:
        worker: ``sglang-dflash`` or ``SGLang``.
        dtype: ``auto`` if the server does not state the one that it chose.
        quantised: quantisation methods by cause.
        block: positions of a drafted block; the largest one if ``adaptive``.
        max_running_requests, concurrent_requests: requested, and possible at once, per replica.
        limited_by, raised_by: what limits them, and the flags that raise the limit.
        copied_blocks: their effect since the start; None if they are off.
        not_finite_drafts: drafted positions at which the drafter's output was not finite.
        expected_per_block: tokens per full block by the server's survival curve; None with a fixed width.
        recent_accept_length: None if too few blocks were verified, or if widths differ.
        recent_cause: most likely cause according to our worker, if drafting does not pay for recent requests.
        other_running_requests: before the probes.
        longest_prompt: tokens.
    """

    worker: str
    target: str
    drafter: str
    dtype: str
    quantised: Mapping[str, str]
    block: int
    adaptive: bool
    max_running_requests: int
    concurrent_requests: int
    limited_by: str
    raised_by: str
    copied_blocks: str | None
    not_finite_drafts: int
    expected_per_block: float | None
    recent_accept_length: float | None
    recent_cause: str | None
    other_running_requests: int
    longest_prompt: int


async def read_server(client: Client) -> Server:
    """Read ``/server_info``, and ``/metrics`` where it is exported.

    Raises:
        DFlashError: no access, no DFLASH, or no tokenizer.
    """
    info = await client.server_info()
    try:
        metrics = (await client.get("/metrics")).text
    except DFlashError:
        metrics = ""
    return parse_server(info, metrics)


def parse_server(info: Mapping[str, Any], metrics: str = "") -> Server:
    """Parse the texts of :func:`read_server`, with the same errors."""
    _require_dflash(info)
    state: Mapping[str, Any] = info["internal_states"][0]
    worker: Mapping[str, Any] = state.get(WORKER_KEY) or {}
    drafting, adaptive = worker.get("drafting") or {}, worker.get("adaptive", False)
    requests = worker.get("requests") or _requests(info, state)
    raised_by = [f"a larger {flag}" for flag in _POOL_SIZES if flag in info["launch_command"]]
    raised_by += filter(None, [requests.get("raised_by")])
    curve = worker.get("width", {}).get("survival", {}).get("curve")
    recent = None if adaptive or drafting.get("pays") is None else drafting["accept_length"]
    running = re.findall(r"^sglang:num_running_reqs(?:\{.*\})? (\S+)", metrics, re.MULTILINE)
    return Server(
        worker="sglang-dflash" if worker else "SGLang",
        target=info["model_path"],
        drafter=info["speculative_draft_model_path"],
        dtype=worker.get("dtype", info["dtype"]),
        quantised={cause: info[key] for cause, key in _QUANTISED.items() if info.get(key)},
        block=worker.get("drafted", info["speculative_num_draft_tokens"]),
        adaptive=adaptive,
        max_running_requests=requests["asked"],
        concurrent_requests=requests["running"],
        limited_by=requests["capped_by"],
        raised_by=", ".join(raised_by),
        copied_blocks=_copies(worker) if worker.get("copied_blocks") else None,
        not_finite_drafts=worker.get("broken_drafts", 0),
        expected_per_block=None if curve is None else 1 + sum(curve),
        recent_accept_length=recent if worker else state.get("avg_spec_accept_length"),
        recent_cause=str(Cause(**drafting["causes"][0])) if drafting.get("causes") else None,
        other_running_requests=int(sum(map(float, running))),
        longest_prompt=info["max_req_input_len"],
    )


def _require_dflash(info: Mapping[str, Any]) -> None:
    algorithm = info.get("speculative_algorithm")
    if algorithm != "DFLASH":
        raise DFlashError(
            f"the server runs {algorithm or 'no'} speculation",
            expected="a server with DFLASH",
            remedy="start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER",
        )
    if info["skip_tokenizer_init"]:
        raise DFlashError(
            "the server has no tokenizer",
            expected="a server that renders prompts",
            remedy="start it without --skip-tokenizer-init",
        )


def _requests(info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """SGLang's worker does not state what limits its requests: derive it from the kind of target."""
    counts = {
        "asked": info["max_running_requests"] // info.get("attn_dp_size", 1),
        "running": state["effective_max_running_requests_per_dp"],
    }
    if counts["running"] >= counts["asked"]:
        return counts | {"capped_by": "--max-running-requests"}
    cap = "recurrent states" if info.get("uses_mamba_radix_cache") else "tokens of K/V"
    return counts | {"capped_by": cap, "raised_by": RAISED_BY[cap]}


def _copies(worker: Mapping[str, Any]) -> str:
    copied, blocks = (worker[f"{name}_length"].values() for name in ("copied_blocks_by_match", "blocks_by_accept"))
    return f"{sum(copied)} of {sum(blocks)} blocks, {worker['tokens_brought_by_copies']} tokens gained over drafts"


@dataclass(frozen=True)
class Answer:
    """One answer of a probe, sent ``start`` seconds after the probe began."""

    task: str
    start: float
    generation: Generation

    @property
    def steps(self) -> int:
        """Verify steps."""
        return int(self.generation.meta.get("spec_verify_ct", 0))


class Load(NamedTuple):
    """Mean running requests of a probe (by Little's law), mean block width, and median decode milliseconds per step."""

    at_once: float
    width: float
    step_ms: float


@dataclass(frozen=True)
class Probe:
    """A probe and, once it has run, its answers.

    Attributes:
        questions: task and messages of each prompt.
        template: whether prompts are rendered by the chat template.
        thinking: the template's switch; None leaves its default.
        cause: the cause that this probe plants; "" for the baseline.
    """

    name: str
    questions: tuple[tuple[str, tuple[Message, ...]], ...]
    template: bool = True
    thinking: bool | None = None
    temperature: float = 0.0
    users: int = 1
    cause: str = ""
    answers: tuple[Answer, ...] = ()

    def of(self, *tasks: str) -> list[Answer]:
        """Return the answers that took a verify step, of these tasks only if there are any."""
        return [answer for answer in self.answers if answer.steps and (not tasks or answer.task in tasks)]

    def accept_length(self, *tasks: str) -> float | None:
        """Return the tokens per verify step, averaged over answers as on the cards; None without a verify step."""
        lengths = [answer.generation.meta["completion_tokens"] / answer.steps for answer in self.of(*tasks)]
        return fmean(lengths) if lengths else None

    def load(self, block: int) -> Load:
        """Return the load of a probe with a verify step; blocks without a stated width have ``block`` positions."""
        done = [(answer.start, answer.steps, answer.generation) for answer in self.of()]
        seconds = sum(generation.last_s for _, _, generation in done)
        widths = sum((generation.meta.get("spec_cap_length") or block) * steps for _, steps, generation in done)
        times = [(generation.last_s - generation.first_s) / steps for _, steps, generation in done]
        return Load(
            seconds / max(start + generation.last_s for start, _, generation in done),
            widths / sum(steps for _, steps, _ in done),
            1000 * median(times),
        )


async def plan_probes(client: Client, thinking: bool | None, long_tokens: int) -> list[Probe]:
    """Return the probes that the server can answer: the baseline first, the one of several users last.

    Args:
        thinking: the setting of the drafter's reference; None for the template's default.
        long_tokens: approximate length of the long prompts.
    """
    questions = tuple((task, (Message(role="user", content=prompt),)) for task, prompt in QUESTIONS)
    raw = Probe("raw prompts", questions, template=False, cause=NO_TEMPLATE)
    first, others = raw, []
    renders, default = await _template(client, questions[0][1])
    if renders:
        thinking = default if thinking is None or default is None else thinking
        first = Probe("chat template", questions, thinking=thinking)
        if thinking is not None:
            cause = THINKING[not thinking]
            others.append(replace(first, name=cause, thinking=not thinking, cause=cause))
        system = Message(role="system", content=_notes(long_tokens * _CHARACTERS_PER_TOKEN))
        long = tuple((task, (system, *messages)) for task, messages in questions)
        others += [
            raw,
            replace(first, name="temperature 1", temperature=1.0, cause=SAMPLING),
            replace(first, name="long context", questions=long, cause=CONTEXT),
        ]
    together = replace(first, name=f"{_USERS} users at once", questions=questions[:_USERS], users=_USERS)
    return [first, *(replace(other, questions=other.questions[:_FEW]) for other in others), together]


async def run_probe(client: Client, probe: Probe, max_tokens: int, report: Callable[[str], None]) -> Probe:
    """Send a probe's questions, after a short warm-up, and return the probe with its answers."""
    report(f"{probe.name}: {len(probe.questions)} prompts")
    prompts = [(task, await _render(client, probe, messages)) for task, messages in probe.questions]
    await asyncio.gather(*(client.generate(ids, _WARM_UP, probe.temperature) for _, ids in prompts[: probe.users]))
    waiting, answers, began = iter(prompts), list[Answer](), time.perf_counter()

    async def user() -> None:
        for task, ids in waiting:
            start = time.perf_counter() - began
            answers.append(Answer(task, start, await client.generate(ids, max_tokens, probe.temperature)))

    await asyncio.gather(*(user() for _ in range(probe.users)))
    return replace(probe, answers=tuple(answers))


async def _render(client: Client, probe: Probe, messages: tuple[Message, ...]) -> list[int]:
    if probe.template:
        return await client.tokenize(list(messages), probe.thinking)
    # Without the newline, a model may end right after the question.
    return await client.tokenize_text("".join(f"{message['content']}\n" for message in messages))


async def _template(client: Client, messages: tuple[Message, ...]) -> tuple[bool, bool | None]:
    """Return whether the server has a chat template, and the default of its thinking switch; None without one."""
    try:
        default, on, off = [await client.tokenize(list(messages), value) for value in (None, True, False)]
    except DFlashError as error:
        if "answered 400" in error.value:
            return False, None
        raise
    return True, None if on == off else default == on


def _notes(characters: int) -> str:
    rng, text = Random(0), "Notes:"
    while len(text) < characters:
        day, name, color, thing = map(rng.choice, (_DAYS, _NAMES, _COLORS, _THINGS))
        text += f" On {day}, {name} painted a {color} {thing}."
    return text[:characters].rpartition(" ")[0]
