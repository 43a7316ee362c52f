"""Measurements of a running server: its state, and a few prompts."""

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from statistics import fmean
from time import perf_counter
from typing import Any

from sglang_dflash.causes import CONTEXT, DRAFTER, NO_TEMPLATE, OTHER_TARGET, SAMPLING, THINKING, Cause
from sglang_dflash.check.diagnose.client import WORKER_KEY, Client
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.published import other_target

_TEXTS = json.loads(Path(__file__).with_name("questions.json").read_text())
QUESTIONS = [(task, prompts[number]) for number in range(3) for task, prompts in _TEXTS["questions"].items()]
_FEW, _USERS = 4, 8  # questions of a variation; users of the last probe
TRIAL, SHORT = 16, 64  # tokens of the first timed answer; shorter answers halve the prompts
_CHARACTERS_PER_TOKEN = 4
_ROOM = 256
_POOL_SIZES = ("--max-mamba-cache-size", "--max-total-tokens")


class Server:
    """A DFLASH server as described by its ``/server_info``; DFlashError without DFLASH or a tokenizer."""

    def __init__(self, info: Mapping[str, Any]) -> None:
        _require_dflash(info)
        states: list[Mapping[str, Any]] = info["internal_states"]  # per replica or group of ranks
        state, worker = states[0], _pooled([each.get(WORKER_KEY) or {} for each in states])
        drafting: Mapping[str, Any] = worker.get("drafting") or {}
        self.worker = "sglang-dflash" if worker else "SGLang's worker"
        self.target, self.drafter = str(info["model_path"]), str(info["speculative_draft_model_path"] or "copies alone")
        self.has_drafter = info["speculative_draft_model_path"] is not None
        # the largest if the width is adaptive
        self.block: int = worker.get("drafted", info["speculative_num_draft_tokens"])
        self.adaptive: bool = worker.get("adaptive", False)
        self.longest_notes: int = info["max_req_input_len"] - _ROOM
        # per replica
        self.requests: dict[str, Any] = dict(worker.get("requests", {}))
        if pools := [f"a larger {flag}" for flag in _POOL_SIZES if flag in info["launch_command"]]:
            self.requests["raised_by"] = ", ".join([*pools, *filter(None, [self.requests.get("raised_by")])])
        self.known: dict[str, str | None] = dict(drafting.get("known", {}))
        if other := other_target(self.drafter, self.target):
            self.known[OTHER_TARGET] = f"its target is {other}"
        curve = worker.get("width", {}).get("survival", {}).get("curve")
        self.full_block = None if curve is None else 1 + sum(curve)
        # None if too few blocks were verified, or if widths differ
        recent = None if self.adaptive or drafting.get("pays") is None else drafting["accept_length"]
        self.recent_accept_length: float | None = recent if worker else state.get("avg_spec_accept_length")
        self.pays: bool | None = drafting.get("pays")
        likeliest = [Cause(**cause) for cause in drafting.get("causes", [])[:1] if cause["cause"] != DRAFTER]
        self.recent_cause = str(likeliest[0]) if likeliest else None  # the probes find the drafter
        length = worker.get("mean_accept_length") if worker else state.get("avg_spec_accept_length")
        facts = [f"Since the start: {length:.2f} tokens per verified block" if length else "No block was verified yet"]
        if steps := worker.get("steps_by_width"):
            shares = ", ".join(f"{count} of width {width}" for width, count in steps.items())
            facts.append(f"Steps: {shares}; {worker['copied_tokens']} accepted tokens were copied")
        if recent := drafting.get("accept_length"):
            pays = {True: "drafting pays", False: "drafting does not pay", None: "not judged yet"}[self.pays]
            facts.append(f"Recent requests: {recent:.2f} tokens per block, {drafting['break_even']:.2f} needed: {pays}")
        if paused := worker.get("width", {}).get("paused"):
            facts.append(f"Drafting is paused: {paused}")
        self.facts = facts


def _pooled(workers: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    if len(workers) == 1 or not all(workers):
        return workers[0]
    steps, blocks = Counter[str](), Counter[str]()
    for each in workers:
        steps.update(each["steps_by_width"])
        blocks.update(each["blocks_by_accept_length"])
    drafting = [each["drafting"] for each in workers]
    judged = [each for each in drafting if each["pays"] is not None] or drafting
    lengths = [each["accept_length"] for each in judged if each["accept_length"] is not None]
    known = {cause: evidence for each in drafting for cause, evidence in each["known"].items()}
    worst = min(judged, key=lambda each: bool(each["pays"]))
    return {
        **workers[0],
        "steps_by_width": steps,
        "mean_accept_length": sum(int(n) * m for n, m in blocks.items()) / blocks.total() if blocks else None,
        "copied_tokens": sum(each["copied_tokens"] for each in workers),
        "drafting": {**worst, "accept_length": fmean(lengths) if lengths else None, "known": known},
    }


def _require_dflash(info: Mapping[str, Any]) -> None:
    if (algorithm := info.get("speculative_algorithm")) != "DFLASH":
        raise DFlashError(
            f"the server's speculative algorithm is {algorithm or 'unset'}, not DFLASH",
            remedy="start it with --speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER",
        )
    if info["skip_tokenizer_init"]:
        raise DFlashError("the server has no tokenizer", remedy="start it without --skip-tokenizer-init")


@dataclass
class Probe:
    """A probe and its answers."""

    name: str
    cause: str = ""  # the cause that this probe plants
    template: bool = True
    thinking: bool | None = None  # None for the template's default
    temperature: float = 0.0
    notes: str = ""  # system message
    prompts: int = _FEW
    users: int = 1
    # answers with a verify step (task, meta_info); tokens of all; seconds
    answers: list[tuple[str, Mapping[str, Any]]] = field(default_factory=list, init=False)
    tokens: int = field(default=0, init=False)
    seconds: float = field(default=0.0, init=False)

    def accept_length(self, *tasks: str) -> float | None:
        """Return the tokens per verify step, averaged over answers as on the cards."""
        answers = [meta for task, meta in self.answers if not tasks or task in tasks]
        return fmean(meta["completion_tokens"] / meta["spec_verify_ct"] for meta in answers) if answers else None

    def width(self, block: int) -> float | None:
        # SGLang reports no width if all blocks have the same
        steps = [(meta["spec_verify_ct"], meta.get("spec_cap_length") or block) for _, meta in self.answers]
        return sum(count * width for count, width in steps) / sum(count for count, _ in steps) if steps else None

    def row(self, block: int) -> dict[str, Any]:
        counts = {"probe": self.name, "answers": len(self.answers), "accept length": self.accept_length()}
        return {**counts, "width": self.width(block), "tokens/s": self.tokens / self.seconds}


async def plan_probes(client: Client, thinking: bool | None, long_tokens: int) -> list[Probe]:
    """Return the possible probes: the baseline first, several users last. ``thinking`` is the reference's."""
    raw = Probe("raw prompts", NO_TEMPLATE, template=False)
    first, others = replace(raw, cause="", prompts=len(QUESTIONS)), []
    renders, default = await _template(client)
    if renders:
        thinking = default if thinking is None or default is None else thinking
        few = Probe("", thinking=thinking)
        first = replace(few, name="chat template", prompts=len(QUESTIONS))
        if thinking is not None:
            cause = THINKING[not thinking]
            others.append(replace(few, name=cause, cause=cause, thinking=not thinking))
        others += [
            raw,
            replace(few, name="temperature 1", cause=SAMPLING, temperature=1.0),
            replace(few, name="long context", cause=CONTEXT, notes=_notes(long_tokens * _CHARACTERS_PER_TOKEN)),
        ]
    return [first, *others, replace(first, name="all at once", prompts=_USERS, users=_USERS)]


def fit(probes: Sequence[Probe], trial: Probe, max_tokens: int, seconds: float) -> tuple[int, float]:
    """Halve the prompts for a slow server; return tokens per answer and the expected seconds.

    ``trial`` shows the server's speed; ``seconds`` is the limit.
    """
    speed = max(1, trial.tokens) / trial.seconds
    if speed * seconds < min(SHORT, max_tokens) * sum(probe.prompts for probe in probes):
        for probe in probes:
            probe.prompts, probe.users = probe.prompts // 2, -(-probe.users // 2)
    prompts = sum(probe.prompts for probe in probes)
    tokens = max(TRIAL, min(max_tokens, int(speed * seconds / prompts)))
    return tokens, prompts * tokens / speed


async def run_probe(client: Client, probe: Probe, max_tokens: int) -> None:
    waiting = iter([(task, await _render(client, probe, prompt)) for task, prompt in QUESTIONS[: probe.prompts]])
    began = perf_counter()

    async def user() -> None:
        for task, ids in waiting:
            meta = await client.generate(ids, max_tokens, probe.temperature)
            probe.tokens, probe.seconds = probe.tokens + meta["completion_tokens"], perf_counter() - began
            probe.answers += [(task, meta)] if meta.get("spec_verify_ct") else []

    await asyncio.gather(*(user() for _ in range(probe.users)))


async def _render(client: Client, probe: Probe, prompt: str) -> list[int]:
    if not probe.template:
        return await client.tokenize(prompt=f"{prompt}\n")  # without the newline, a model may end at once
    system = [{"role": "system", "content": probe.notes}] if probe.notes else []
    switch = {} if probe.thinking is None else {"chat_template_kwargs": {"enable_thinking": probe.thinking}}
    return await client.tokenize(messages=[*system, {"role": "user", "content": prompt}], **switch)


async def _template(client: Client) -> tuple[bool, bool | None]:
    try:
        probes = [Probe("", thinking=thinking) for thinking in (None, True, False)]
        default, on, off = [await _render(client, probe, QUESTIONS[0][1]) for probe in probes]
    except DFlashError as error:
        if "answered 400" in error.problem:
            return False, None
        raise
    return True, None if on == off else default == on


def _notes(characters: int) -> str:
    rng, text = Random(0), "Notes:"
    while len(text) < characters:
        text += " On {}, {} painted a {} {}.".format(*map(rng.choice, _TEXTS["notes"]))
    return text[:characters].rpartition(" ")[0]
