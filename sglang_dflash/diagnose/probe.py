"""Measurements of a running server: its configuration and counters, and probes of a few short prompts each."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean, median
from typing import Any

from sglang_dflash.causes import CONTEXT, NO_TEMPLATE, QUANTISED_DRAFTER, QUANTISED_TARGET, SAMPLING, THINKING
from sglang_dflash.diagnose.client import WORKER_KEY, Client, Message, Sampling
from sglang_dflash.errors import DFlashError
from sglang_dflash.memory.fit import RAISED_BY

PROMPTS = {
    "math": (
        "There are 10 cards in Quinn's bag. Quinn loses 5 of them. Then Quinn finds 22 cards at home. "
        "How many cards does Quinn have now?",
        "Ben starts the day with 52 shells. Ben sells half of the shells. Then Ben finds 39 shells at home. "
        "How many shells does Ben have now?",
        "There are 13 shells in Ben's bag. Ben gives 7 shells to Rosa. Ben buys 38 more. "
        "How many shells does Ben have now?",
    ),
    "code": (
        "Write a Python function `count_positive` that returns the number of the positive numbers. Use a loop.",
        "Write a Python function `sum_odd` that returns the sum of the odd numbers. Use a loop.",
        "Write a Python function `count_even` that returns the number of the even numbers. Use a loop.",
    ),
    "json": (
        "Dan ordered 17 white pens to be sent to Athens. "
        "Write a JSON record with the keys color, city, item, quantity.",
        "Noah ordered 68 red shells to be sent to Paris before Friday. "
        "Write a JSON record with the keys color, city, item, name, day, quantity.",
        "Cleo ordered 69 red shells before Saturday for 29 dollars to be sent to Athens. "
        "Write a JSON record with the keys city, quantity, color, name, item, price.",
    ),
    "chat": (
        "What should Grace see in Cairo in February?",
        "Tell Cleo about Dublin in December.",
        "I am going to Tokyo in March with Ava. Any advice?",
    ),
}
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
        ours: whether this package's worker serves; otherwise SGLang's.
        dtype: ``auto`` if the server does not state the one that it chose.
        quantised: quantisation methods by cause.
        block: positions of a drafted block; the largest one if ``adaptive``.
        requested, running: concurrent requests of one replica.
        capped_by, raised_by: what limits ``running``, and the flags that raise it.
        copies: effect of copied blocks since the start; None if they are off.
        not_finite: drafted positions at which the drafter's output was not finite.
        expected: tokens per full block by the server's survival curve; None with a fixed width.
        recent: accept length of recent requests; None if too few were verified, or if widths differ.
        causes: causes found by our worker, if drafting does not pay for recent requests.
        others: requests that were running before the probes.
        longest_prompt: tokens.
    """

    ours: bool
    target: str
    drafter: str
    dtype: str
    quantised: Mapping[str, str]
    block: int
    adaptive: bool
    requested: int
    running: int
    capped_by: str
    raised_by: str
    copies: str | None
    not_finite: int
    expected: float | None
    recent: float | None
    causes: tuple[Mapping[str, Any], ...]
    others: int
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
    fixed_sizes = [f"a larger {flag}" for flag in _POOL_SIZES if flag in info["launch_command"]]
    curve = worker.get("width", {}).get("survival", {}).get("curve")
    recent = None if adaptive or drafting.get("pays") is None else drafting["accept_length"]
    return Server(
        ours=bool(worker),
        target=info["model_path"],
        drafter=info["speculative_draft_model_path"],
        dtype=worker.get("dtype", info["dtype"]),
        quantised={cause: info[key] for cause, key in _QUANTISED.items() if info.get(key)},
        block=worker.get("drafted", info["speculative_num_draft_tokens"]),
        adaptive=adaptive,
        requested=requests["asked"],
        running=requests["running"],
        capped_by=requests["capped_by"],
        raised_by=", ".join([*fixed_sizes, *filter(None, [requests.get("raised_by")])]),
        copies=_copies(worker) if worker.get("copied_blocks") else None,
        not_finite=worker.get("broken_drafts", 0),
        expected=None if curve is None else 1 + sum(curve),
        recent=recent if worker else state.get("avg_spec_accept_length"),
        causes=tuple(drafting["causes"]) if drafting.get("pays") is False else (),
        others=int(sum(map(float, re.findall(r"^sglang:num_running_reqs(?:\{.*\})? (\S+)", metrics, re.MULTILINE)))),
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
    by_length = {int(length): count for length, count in worker["copied_blocks_by_match_length"].items()}
    copied, blocks = sum(by_length.values()), sum(worker["blocks_by_accept_length"].values())
    if not copied:
        return f"none of {blocks} blocks"
    length = sum(length * count for length, count in by_length.items()) / copied
    gained = worker["tokens_brought_by_copies"]
    return f"{copied} of {blocks} blocks, mean match {length:.1f} tokens, {gained} tokens gained over drafts"


@dataclass(frozen=True)
class Answer:
    """One answer. ``accepted[k]`` counts steps that accepted ``k`` drafts; times are seconds since the probe began."""

    task: str
    tokens: int
    steps: int
    accepted: tuple[int, ...]
    width: float
    start: float
    first: float
    end: float


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

    def count(self, *tasks: str) -> int:
        return len(self._of(tasks))

    def accept_length(self, *tasks: str) -> float | None:
        """Return the tokens per verify step, averaged over answers as on the cards; None without a verify step."""
        lengths = [answer.tokens / answer.steps for answer in self._of(tasks) if answer.steps]
        return fmean(lengths) if lengths else None

    def _of(self, tasks: tuple[str, ...]) -> list[Answer]:
        return [answer for answer in self.answers if not tasks or answer.task in tasks]

    @property
    def width(self) -> float | None:
        """Mean positions of a verified block."""
        steps = sum(answer.steps for answer in self.answers)
        return sum(answer.width * answer.steps for answer in self.answers) / steps if steps else None

    @property
    def at_once(self) -> float:
        """Mean number of running requests, by Little's law."""
        return sum(answer.end - answer.start for answer in self.answers) / max(answer.end for answer in self.answers)

    @property
    def step_ms(self) -> float:
        """Median over answers of the decode time per verify step, milliseconds."""
        return 1000 * median((answer.end - answer.first) / answer.steps for answer in self.answers if answer.steps)


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


async def run_probe(client: Client, probe: Probe, block: int, max_tokens: int, report: Callable[[str], None]) -> Probe:
    """Send a probe's questions, after a short warm-up, and return the probe with its answers."""
    report(f"{probe.name}: {len(probe.questions)} prompts")
    prompts = [(task, await _render(client, probe, messages)) for task, messages in probe.questions]
    sampling, brief = Sampling(max_tokens, probe.temperature), Sampling(_WARM_UP, probe.temperature)
    await asyncio.gather(*(client.generate(ids, brief) for _, ids in prompts[: probe.users]))
    waiting, answers, began = iter(prompts), list[Answer](), time.perf_counter()

    async def user() -> None:
        for task, ids in waiting:
            start = time.perf_counter() - began
            done = await client.generate(ids, sampling)
            meta = done.event["meta_info"]
            answers.append(
                Answer(
                    task,
                    meta["completion_tokens"],
                    meta.get("spec_verify_ct", 0),
                    tuple(meta.get("spec_correct_drafts_histogram", ())),
                    meta.get("spec_cap_length") or block,
                    start,
                    start + done.ttft_s,
                    start + done.latency_s,
                )
            )

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
