"""The verdict of a diagnosis: what limits drafting, likeliest cause first, with the flag or request field to change."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log, sqrt
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from sglang_dflash import causes
from sglang_dflash.causes import Cause
from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.probe import PROMPTS, Load, Probe, Server, plan_probes, read_server, run_probe
from sglang_dflash.diagnose.tables import MISSING, Table
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, published_pairs
from sglang_dflash.errors import DFlashError

SENTENCES = 3
FULL = 0.9  # share of the block's width from which a probe's accept length counts as a full block's
_ROOM = 256  # tokens of a prompt outside its notes
_WIDTHS = (2, 3, 4, 6, 8, 12)
# Public benchmarks whose prompts resemble a task of the probes.
_LIKE = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench", "alpaca")}
_PROBES = "accept length: tokens per verify step, mean over answers; at once: mean running requests"
_SURVIVAL = "share of steps that committed the draft at a position"


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


class Smaller(NamedTuple):
    """The block size with the highest estimated throughput, and its throughput over that of the served size."""

    block: int
    gain: float


def survival(probes: Sequence[Probe], block: int) -> list[float]:
    """Return the share of steps that committed draft j, for j = 1 ... block - 1."""
    histograms = [a.generation.meta["spec_correct_drafts_histogram"] for probe in probes for a in probe.of()]
    steps = sum(map(sum, histograms))
    return [sum(sum(histogram[j:]) for histogram in histograms) / steps for j in range(1, block)]


def smaller_block(one: Load, many: Load, curve: Sequence[float], block: int) -> Smaller:
    """Estimate the best fixed block size at the load of ``many``.

    A step's time is modelled as linear in its verified positions, with two parameters from two loads. The model leaves
    out the cost per request, so the gain is approximate.

    Args:
        curve: see :func:`survival`.
    """
    if not one.step_ms:  # answers in one event have no measurable steps (a large --stream-interval)
        return Smaller(block, 1.0)
    positions = many.at_once * many.width - one.at_once * one.width
    per_position = max(0.0, (many.step_ms - one.step_ms) / max(1.0, positions))
    fixed = max(0.0, one.step_ms - per_position * one.at_once * one.width)

    def rate(width: int) -> float:
        return (1 + sum(curve[: width - 1])) / (fixed + per_position * many.at_once * width)

    best = max((*(width for width in _WIDTHS if width < block), block), key=rate)
    return Smaller(best, rate(best) / rate(block))


class Variation(NamedTuple):
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
        guesses = self.measured < min(causes.GUESSING, (1 + self.server.block) / 2)
        return guesses or (self.stated is not None and self.measured < causes.LOW * self.stated[0])


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
        yield Cause(causes.NO_SERVER_TEMPLATE)
    if s.dtype == "float16":
        yield Cause(causes.FLOAT16)
    elif s.not_finite_drafts:
        yield Cause(causes.NOT_FINITE, f"{s.not_finite_drafts} positions")
    if f.other_target:
        yield Cause(causes.OTHER_TARGET, f"its target is {f.other_target}")
    yield from (Cause(cause, method) for cause, method in s.quantised.items())
    if f.has_template:  # raw prompts do not show whether the drafter matches
        yield Cause(causes.OTHER_TARGET if f.measured < causes.GUESSING and not f.other_target else causes.DRAFTER)


def _traffic(f: Findings) -> Iterator[str]:
    s = f.server
    if not f.has_template:
        yield f"Requests to /v1/chat/completions fail. Cause: {Cause(causes.NO_SERVER_TEMPLATE)}."
    if s.recent_cause:
        yield f"Drafting does not pay for recent requests. Likely cause: {s.recent_cause}."
    elif (length := s.recent_accept_length) is not None:
        bad = [v for v in f.variations if v.accept_length <= causes.LOW * f.measured]
        nearest = min(bad, key=lambda v: abs(log(length / v.accept_length)), default=None)
        if nearest and length < sqrt(nearest.accept_length * f.measured):
            likely = Cause(nearest.cause, f"the probe '{nearest.name}' gets {nearest.accept_length:.1f}")
            best = f"{f.measured:.1f} is possible with the chat template"
            yield f"Recent requests got {length:.1f} tokens per step, {best}. Likely cause: {likely}."


def _load(f: Findings) -> Iterator[str]:
    s = f.server
    if s.concurrent_requests < s.max_running_requests:
        limited = f"{s.concurrent_requests} of {s.max_running_requests} requests (--max-running-requests) run at once"
        yield f"Only {limited}, limited by {s.limited_by}. Fix: use {s.raised_by}, or a higher --mem-fraction-static."
    # A drafter that does not match its target gains from no block size.
    if f.smaller and f.smaller.gain >= causes.FASTER and not f.is_low:
        better = f"{f.smaller.block} would give about {f.smaller.gain:.1f}x the throughput"
        flags = f"--speculative-adaptive, or --speculative-num-draft-tokens {f.smaller.block}"
        yield f"Block size {s.block} is too large for {f.users} concurrent users; {better}. Fix: use {flags}."
    if s.dtype == "float16" and not f.is_low:
        yield f"The pair runs in float16, though these probes are not affected. Fix: {causes.FIXES[causes.FLOAT16]}."


@dataclass(frozen=True)
class Report:
    """All measurements and findings; the baseline is the first probe. ``survival`` as :func:`survival`."""

    findings: Findings
    probes: Sequence[Probe]
    reference: Reference | None
    survival: Sequence[float]

    @property
    def verdict(self) -> list[str]:
        return verdict(self.findings)

    def as_json(self) -> dict[str, Any]:
        found, reference = asdict(self.findings), self.reference and asdict(self.reference)
        measured = {"probes": self._rows(), "survival": list(self.survival)}
        return {"findings": found, "reference": reference, **measured, "verdict": self.verdict}

    def tables(self) -> list[Table]:
        card, rows = self.reference, self._rows()
        server = asdict(self.findings.server) | {"card": f"{card.source}, block {card.block}" if card else None}
        shares = {str(draft): share for draft, share in enumerate(self.survival, 1)}
        return [
            _table("server", "", [{"property": key.replace("_", " "), "value": server[key]} for key in server]),
            _table("probes", _PROBES, rows),
            _table("survival", _SURVIVAL, [shares]),
        ]

    def _rows(self) -> list[dict[str, Any]]:
        first, stated = self.probes[0], self.reference.lengths if self.reference else {}
        rows: list[tuple[str, Probe, list[str]]] = [(f"{first.name}: {task}", first, [task]) for task in PROMPTS]
        rows += [(probe.name, probe, []) for probe in self.probes[1:]]
        return [
            {
                "probe": name,
                "prompts": sum(not tasks or task in tasks for task, _ in probe.questions),
                "accept length": probe.accept_length(*tasks),
                "card": stated.get(*tasks) if tasks else None,
                **(probe.load(self.findings.server.block)._asdict() if probe.of() else dict.fromkeys(Load._fields)),
            }
            for name, probe, tasks in rows
        ]


def _table(title: str, caption: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = [name.replace("_", " ") for name in rows[0]]
    return Table(title, caption, columns, [[_cell(value) for value in row.values()] for row in rows])


def _cell(value: Any) -> str:
    if value in (None, "", {}):
        return MISSING
    return f"{value:.2f}" if isinstance(value, float) else str(value)


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
    first = await run_probe(client, first, max_tokens, report)
    if first.accept_length() is None:
        raise DFlashError(
            f"no answer of the probe {first.name!r} took a verify step",
            expected="answers of several tokens",
            remedy="send the server a prompt by hand; with no output there is nothing to draft",
        )
    after = await read_server(client)  # with the counts of the baseline, without those of the other probes
    done = [await run_probe(client, probe, max_tokens, report) for probe in more]
    kept = ("recent_accept_length", "recent_cause", "other_running_requests")
    server = replace(after, **{name: getattr(before, name) for name in kept})
    return judge(server, [first, *done], reference)


def judge(server: Server, probes: Sequence[Probe], reference: Reference | None) -> Report:
    """Return the report; the baseline is the first probe, the one of several users the last."""
    first, *others, together = probes
    curve = survival((first, together), server.block)
    one, many = first.load(server.block), together.load(server.block)
    lengths = reference.lengths if reference else {}
    findings = Findings(
        server,
        _full_block(server, first.accept_length(*lengths) or 0.0, one.width),
        (mean(lengths.values()), reference.source) if reference and lengths else None,
        has_template=first.template,
        other_target=other_target(server.drafter, server.target),
        variations=tuple(Variation(p.name, p.cause, length) for p in others if (length := p.accept_length())),
        smaller=None if server.adaptive else smaller_block(one, many, curve, server.block),
        users=together.users,
    )
    return Report(findings, probes, reference, curve)


def _full_block(server: Server, measured: float, width: float) -> float:
    """Use the server's survival curve for narrow blocks only: it leaves out copied blocks and contains a prior."""
    is_narrow = width < FULL * server.block
    return max(measured, server.expected_per_block or 0.0) if is_narrow else measured
