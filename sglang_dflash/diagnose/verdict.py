"""The verdict of a diagnosis: what limits drafting, likeliest cause first, with the flag or request field to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from math import log, sqrt
from pathlib import Path
from statistics import mean
from typing import Any

from sglang_dflash.causes import (
    DRAFTER,
    FASTER,
    FIXES,
    FLOAT16,
    GUESSING,
    LOW,
    NO_SERVER_TEMPLATE,
    NOT_FINITE,
    OTHER_TARGET,
    Cause,
)
from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.probe import PROMPTS, Probe, Server, plan_probes, read_server, run_probe
from sglang_dflash.diagnose.tables import MISSING, Table
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, published_pairs
from sglang_dflash.errors import DFlashError

SENTENCES = 3
FULL = 0.9  # share of the block's width from which a probe's accept length counts as a full block's
_ROOM = 256  # tokens of a prompt outside its notes
_WIDTHS = (2, 3, 4, 6, 8, 12)
# Public benchmarks whose prompts resemble a task of the probes.
_LIKE = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench", "alpaca")}
_CAPTIONS = {
    "accept length": "tokens per verify step, mean over answers; width: mean positions of a block",
    "survival": "share of steps that committed the draft at a position",
    "load": "at once: mean running requests; step ms: median decode time of a verify step",
}


@dataclass(frozen=True)
class Reference:
    """Published accept lengths of a drafter.

    Attributes:
        thinking: whether thinking was on; None if that is unknown.
        block: block size of the figures.
        lengths: by task of the probes; may be empty.
    """

    source: str
    thinking: bool | None
    block: int
    lengths: Mapping[str, float]


def find_reference(drafter: str, block: int) -> Reference | None:
    """Return the figures of a drafter's model card, or those stored with a tiny pair, nearest to a block size."""
    if card := card_of_drafter(drafter):
        near, stated = accept_lengths(card, block)
        like = {task: [stated[name] for name in names if name in stated] for task, names in _LIKE.items()}
        lengths = {task: mean(found) for task, found in like.items() if found}
        return Reference(card["card"], card["thinking"], near, lengths)
    stored = Path(drafter, "provenance.json")
    measured = json.loads(stored.read_text()).get("accept_lengths") if stored.exists() else None
    if measured is None:
        return None
    figures = {task: row["accept_length"] for task, row in measured.items()}
    near = min(map(int, figures["math"]), key=lambda width: abs(width - block))
    lengths = {task: by_block[str(near)] for task, by_block in figures.items()}
    return Reference("`sglang-dflash pairs list`", False, near, lengths)


def other_target(drafter: str, target: str) -> str | None:
    """Return the target of a published drafter if the server runs another published target."""
    card, served = card_of_drafter(drafter), Path(target).name.lower()
    others = {Path(other["target"]).name.lower() for other in published_pairs().values() if other is not card}
    return str(card["target"]) if card and served in others else None


@dataclass(frozen=True)
class Load:
    """Verify steps of a probe: ``users`` sent requests, and ``at_once`` of them were running in the mean."""

    users: int
    at_once: float
    width: float
    accept_length: float
    step_ms: float

    @classmethod
    def of(cls, probe: Probe) -> Load:
        assert probe.width is not None and probe.accept_length() is not None
        return cls(probe.users, probe.at_once, probe.width, probe.accept_length() or 0.0, probe.step_ms)


@dataclass(frozen=True)
class Smaller:
    """The block size with the highest estimated throughput, and its throughput over that of the served size."""

    block: int
    gain: float


def survival(probes: Sequence[Probe], block: int) -> list[float]:
    """Return the share of steps that committed draft j, for j = 1 ... block - 1."""
    histograms = zip_longest(*(answer.accepted for probe in probes for answer in probe.answers), fillvalue=0)
    counts = [sum(column) for column in histograms]
    return [sum(counts[j:]) / sum(counts) if counts else 0.0 for j in range(1, block)]


def smaller_block(one: Load, many: Load, curve: Sequence[float], block: int) -> Smaller:
    """Estimate the best fixed block size at the load of ``many``.

    A step's time is modelled as linear in its verified positions, with two parameters from two loads. The model leaves
    out the cost per request, so the gain is approximate.

    Args:
        curve: see :func:`survival`.
    """
    positions = many.at_once * many.width - one.at_once * one.width
    per_position = max(0.0, (many.step_ms - one.step_ms) / max(1.0, positions))
    fixed = max(0.0, one.step_ms - per_position * one.at_once * one.width)

    def rate(width: int) -> float:
        return (1 + sum(curve[: width - 1])) / (fixed + per_position * many.at_once * width)

    best = max((*(width for width in _WIDTHS if width < block), block), key=rate)
    return Smaller(best, rate(best) / rate(block))


@dataclass(frozen=True)
class Variation:
    """A probe that plants one cause."""

    name: str
    cause: str
    accept_length: float


@dataclass(frozen=True)
class Findings:
    """Results of the probes.

    Attributes:
        measured: tokens per step of the baseline; of a full block, if the width is adaptive.
        stated: the reference's accept length on the same tasks, and its source; None for an unknown drafter.
        has_template: whether the server renders conversations; if not, the baseline has raw prompts.
        other_target: see :func:`other_target`.
        smaller: for ``users`` concurrent users; None with an adaptive width.
    """

    server: Server
    measured: float
    stated: tuple[float, str] | None = None
    has_template: bool = True
    other_target: str | None = None
    variations: tuple[Variation, ...] = ()
    smaller: Smaller | None = None
    users: int = 8

    @property
    def is_low(self) -> bool:
        guesses = self.measured < min(GUESSING, (1 + self.server.block) / 2)
        return guesses or (self.stated is not None and self.measured < LOW * self.stated[0])


def verdict(findings: Findings) -> list[str]:
    """Return at most three sentences; none for a healthy server."""
    return [*(_drafter if findings.is_low else _traffic)(findings), *_load(findings)][:SENTENCES]


def _drafter(f: Findings) -> Iterator[str]:
    stated = f", {f.stated[0]:.1f} expected by {f.stated[1]}" if f.stated else ""
    for cause in _causes(f):
        yield f"Too few drafts are accepted ({f.measured:.1f} tokens per step{stated}). Likely cause: {cause}."


def _causes(f: Findings) -> Iterator[Cause]:
    """Causes that the server states come first, then those that only the accept length shows."""
    s = f.server
    if not f.has_template:
        yield Cause(NO_SERVER_TEMPLATE)
    if s.dtype == "float16":
        yield Cause(FLOAT16)
    elif s.not_finite:
        yield Cause(NOT_FINITE, f"{s.not_finite} positions")
    if f.other_target:
        yield Cause(OTHER_TARGET, f"its target is {f.other_target}")
    yield from (Cause(cause, method) for cause, method in s.quantised.items())
    if f.has_template:  # raw prompts do not show whether the drafter matches
        yield Cause(OTHER_TARGET if f.measured < GUESSING and not f.other_target else DRAFTER)


def _traffic(f: Findings) -> Iterator[str]:
    s = f.server
    if not f.has_template:
        yield f"The server has no chat template, so /v1/chat/completions fails. Fix: {FIXES[NO_SERVER_TEMPLATE]}."
    if s.causes:
        cause, evidence = s.causes[0], s.causes[0].get("evidence")
        name = cause["cause"] + (f" ({evidence})" if evidence else "")
        yield f"Drafting does not pay for recent requests. Likely cause: {name}. Fix: {cause['remedy']}."
    elif (length := s.recent) is not None:
        bad = [v for v in f.variations if v.accept_length <= LOW * f.measured]
        nearest = min(bad, key=lambda v: abs(log(length / v.accept_length)), default=None)
        if nearest and length < sqrt(nearest.accept_length * f.measured):
            likely = Cause(nearest.cause, f"the probe '{nearest.name}' gets {nearest.accept_length:.1f}")
            best = f"{f.measured:.1f} is possible with the chat template"
            yield f"Recent requests got {length:.1f} tokens per step, {best}. Likely cause: {likely}."


def _load(f: Findings) -> Iterator[str]:
    s = f.server
    if s.running < s.requested:
        limited = f"{s.running} of {s.requested} requests (--max-running-requests) run at once"
        yield f"Only {limited}, limited by {s.capped_by}. Fix: {s.raised_by}, or a higher --mem-fraction-static."
    if f.smaller is not None and f.smaller.gain >= FASTER and not f.is_low:  # a wrong drafter gains from no blocks
        better = f"{f.smaller.block} would give about {f.smaller.gain:.1f}x the throughput"
        flags = f"--speculative-adaptive, or --speculative-num-draft-tokens {f.smaller.block}"
        yield f"Block size {s.block} is too large for {f.users} concurrent users; {better}. Fix: use {flags}."
    if s.dtype == "float16" and not f.is_low:
        harmless = f"these probes were not affected ({f.measured:.1f} tokens per step)"
        yield f"The pair runs in float16; {harmless}. Fix: {FIXES[FLOAT16]}."


@dataclass(frozen=True)
class Report:
    """All measurements and findings.

    Attributes:
        probes: the baseline first.
        survival: see :func:`survival`.
        loads: of one user and of several.
    """

    findings: Findings
    probes: Sequence[Probe]
    reference: Reference | None
    survival: Sequence[float]
    loads: Sequence[Load]

    @property
    def verdict(self) -> list[str]:
        return verdict(self.findings)

    def as_json(self) -> dict[str, Any]:
        reference = self.reference and asdict(self.reference)
        return {"findings": asdict(self.findings), "reference": reference, **self._measured(), "verdict": self.verdict}

    def tables(self) -> list[Table]:
        s, card = self.findings.server, self.reference
        server = {
            "worker": "sglang-dflash" if s.ours else "SGLang",
            "target": "/".join(Path(s.target).parts[-2:]),
            "drafter": "/".join(Path(s.drafter).parts[-2:]),
            "card": f"{card.source}, block {card.block}" if card else MISSING,
            "dtype": s.dtype,
            "block": f"{s.block}{' at most' if s.adaptive else ''}",
            "concurrent requests": f"{s.running} of {s.requested} requested, limited by {s.capped_by}",
            "copied blocks": s.copies or "off",
            "other running requests": str(s.others),
            "recent accept length": _cell(s.recent),
        }
        measured = [
            Table(
                title,
                _CAPTIONS[title],
                [name.replace("_", " ") for name in rows[0]],
                [list(map(_cell, row.values())) for row in rows],
            )
            for title, rows in self._measured().items()
        ]
        return [Table("server", "", ["property", "value"], [list(row) for row in server.items()]), *measured]

    def _measured(self) -> dict[str, list[dict[str, Any]]]:
        first, stated = self.probes[0], self.reference.lengths if self.reference else {}
        rows: list[tuple[str, Probe, list[str]]] = [(f"{first.name}: {task}", first, [task]) for task in PROMPTS]
        rows += [(probe.name, probe, []) for probe in self.probes[1:]]
        lengths = [
            {
                "probe": name,
                "prompts": probe.count(*tasks),
                "accept length": probe.accept_length(*tasks),
                "card": stated.get(*tasks) if tasks else None,
                "width": probe.width,
            }
            for name, probe, tasks in rows
        ]
        by_position = {str(draft): share for draft, share in enumerate(self.survival, 1)}
        return {"accept length": lengths, "survival": [by_position], "load": [asdict(load) for load in self.loads]}


def _cell(value: Any) -> str:
    return MISSING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


async def diagnose(client: Client, max_tokens: int, long_tokens: int, report: Callable[[str], None]) -> Report:
    """Read the server, probe it and judge it.

    Args:
        max_tokens: per answer.
        long_tokens: approximate length of the long prompts.
        report: receives one line per probe.

    Raises:
        DFlashError: nothing that can be diagnosed.
    """
    before = await read_server(client)
    reference = find_reference(before.drafter, before.block)
    long_tokens = min(long_tokens, before.longest_prompt - _ROOM)
    first, *more = await plan_probes(client, reference.thinking if reference else None, long_tokens)
    first = await run_probe(client, first, before.block, max_tokens, report)
    if first.accept_length() is None:
        raise DFlashError(
            f"no answer of the probe {first.name!r} took a verify step",
            expected="answers of several tokens",
            remedy="send the server a prompt by hand; with no output there is nothing to draft",
        )
    after = await read_server(client)  # with the counts of the baseline, without those of the other probes
    done = [await run_probe(client, probe, before.block, max_tokens, report) for probe in more]
    server = replace(after, recent=before.recent, causes=before.causes, others=before.others)
    return judge(server, [first, *done], reference)


def judge(server: Server, probes: Sequence[Probe], reference: Reference | None) -> Report:
    """Return the report; the baseline is the first probe, the one of several users the last."""
    first, *others, together = probes
    one, many, curve = Load.of(first), Load.of(together), survival((first, together), server.block)
    lengths = reference.lengths if reference else {}
    findings = Findings(
        server,
        _full_block(server, first, tuple(lengths)),
        (mean(lengths.values()), reference.source) if reference and lengths else None,
        has_template=first.template,
        other_target=other_target(server.drafter, server.target),
        variations=tuple(Variation(p.name, p.cause, length) for p in others if (length := p.accept_length())),
        smaller=None if server.adaptive else smaller_block(one, many, curve, server.block),
        users=together.users,
    )
    return Report(findings, probes, reference, curve, [one, many])


def _full_block(server: Server, probe: Probe, tasks: Sequence[str]) -> float:
    """Use the server's survival curve for narrow blocks only: it leaves out copied blocks and contains a prior."""
    measured = probe.accept_length(*tasks) or 0.0
    is_narrow = server.expected is not None and (probe.width or 0) < FULL * server.block
    return max(measured, server.expected or 0.0) if is_narrow else measured
