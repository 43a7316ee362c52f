"""The verdict: what is wrong, most likely cause first, and the flag or request field to change. Pure logic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import log, sqrt

from sglang_dflash.diagnose.cost import Narrower
from sglang_dflash.diagnose.server import QUANTISED, Server

SENTENCES = 3
LOW = 0.7  # share of the reference's accept length under which something is wrong with the drafter
GUESSES = 2.0  # tokens per step under which a drafter does not know its target
WORSE = 0.7  # share of the reference probe's accept length under which another probe explains bad traffic
GAIN = 1.15  # tokens per millisecond of a narrower block over the served one's

_FLOAT16 = "The pair is served in float16, which hidden states of Qwen3 targets overflow"


@dataclass(frozen=True)
class Other:
    """A probe that differs from the reference probe in one thing, and what ends the difference."""

    name: str
    accept_length: float
    change: str


@dataclass(frozen=True)
class Findings:
    """What the probes found.

    Attributes:
        measured: tokens per step of the reference probe; of a full block, if the width is adaptive.
        stated: the reference's on the same tasks, and its source; None for an unknown drafter.
        has_template: whether the server renders conversations; without, the reference probe is of raw prompts.
        other_target: the published target that the drafter is for, if another one is served.
        others: probes between the reference probe and the last.
        narrower: a better width for ``users`` at once; None with an adaptive width.
    """

    server: Server
    measured: float
    stated: tuple[float, str] | None = None
    has_template: bool = True
    other_target: str | None = None
    others: tuple[Other, ...] = ()
    narrower: Narrower | None = None
    users: int = 8

    @property
    def is_low(self) -> bool:
        guesses = self.measured < min(GUESSES, (1 + self.server.block) / 2)
        return guesses or (self.stated is not None and self.measured < LOW * self.stated[0])


def verdict(findings: Findings) -> list[str]:
    """At most three sentences; none if nothing is wrong."""
    judged = _drafts(findings) if findings.is_low else _traffic(findings)
    return [*judged, *_load(findings)][:SENTENCES]


def _drafts(f: Findings) -> Iterator[str]:
    """Causes in what is served: first those that the server states, then what only the accept length tells."""
    s = f.server
    found = f"{f.measured:.1f} tokens a step" + (f", {f.stated[0]:.1f} by {f.stated[1]}" if f.stated else "")
    if not f.has_template:
        yield f"The server has no chat template, and raw prompts draft badly ({found}): --chat-template FILE."
    if s.dtype == "float16":
        yield f"{_FLOAT16} ({found}): --dtype bfloat16."
    elif s.broken_drafts:
        yield f"{s.broken_drafts} drafts were not finite ({found}): compare the drafter's files with its card."
    if f.other_target:
        yield f"The drafter is for {f.other_target} ({found}): --speculative-draft-model-path with this target's."
    for model, method in s.quantised.items():
        yield f"The {model} is quantised ({method}; {found}): compare without --{QUANTISED[model].replace('_', '-')}."
    if not f.has_template:
        return  # raw prompts tell nothing of the drafter
    if f.measured < GUESSES:
        why, flag = "guesses", "it was trained for another target: --speculative-draft-model-path with this target's"
    else:
        why, flag = "accepts too little", "its files or the target's are of another revision: compare them with their "
        flag += "repositories', --speculative-draft-model-revision, --revision"
    yield f"The drafter {why}, with the chat template too ({found}); {flag}."


def _traffic(f: Findings) -> Iterator[str]:
    """The drafter is good: what keeps its users from having it."""
    s = f.server
    if not f.has_template:
        yield "The server has no chat template, so /v1/chat/completions fails: --chat-template FILE."
    if s.unpaid and s.unpaid["causes"]:
        cause = s.unpaid["causes"][0]
        yield f"Drafting did not pay for recent requests, the server found: {cause['cause']}; {cause['remedy']}."
    elif (length := s.so_far) is not None:
        explain = [o for o in f.others if o.accept_length <= WORSE * f.measured]
        nearest = min(explain, key=lambda o: abs(log(length / o.accept_length)), default=None)
        if nearest and length < sqrt(nearest.accept_length * f.measured):
            probe = f"the probe '{nearest.name}' ({nearest.accept_length:.1f})"
            better = f"{f.measured:.1f} is what the chat template gets: {nearest.change}"
            yield f"Requests so far got {length:.1f} tokens a step, about as {probe}, where {better}."


def _load(f: Findings) -> Iterator[str]:
    """What costs speed at any accept length."""
    s = f.server
    if s.running < s.asked:
        asked = f"{s.running} of {s.asked} requests (--max-running-requests) run at once"
        yield f"Only {asked}, capped by {s.capped_by}: {s.raised_by}, --mem-fraction-static."
    if f.narrower is not None and f.narrower.gain >= GAIN and not f.is_low:  # a drafter that is wrong wants no blocks
        better = f"{f.narrower.width} would bring about {f.narrower.gain:.1f} times the tokens"
        flags = f"--speculative-adaptive, or --speculative-num-draft-tokens {f.narrower.width}"
        yield f"Blocks of {s.block} are too wide for {f.users} users, to whom {better}: {flags}."
    if s.dtype == "float16" and not f.is_low:
        yield f"{_FLOAT16}, though not in these probes ({f.measured:.1f} tokens a step): --dtype bfloat16."
