"""The verdict of a diagnosis: what limits drafting, and its fix."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import log, sqrt
from signal import SIGTERM
from statistics import fmean
from typing import Any, NamedTuple

from sglang_dflash import causes
from sglang_dflash.causes import Cause
from sglang_dflash.check.diagnose.client import Client
from sglang_dflash.check.diagnose.probe import TRIAL, Probe, Server, fit, plan_probes, run_probe
from sglang_dflash.errors import DFlashError
from sglang_dflash.launch.published import accept_lengths, card_of_drafter

SENTENCES = 3
FULL = 0.9  # share of the block size from which a block counts as full
# public benchmarks that resemble the tasks
_LIKE = {"math": ("gsm8k", "math500"), "code": ("humaneval", "mbpp"), "chat": ("mt-bench", "alpaca")}
_BARS = "▁▂▃▄▅▆▇█"


class Reference(NamedTuple):
    source: str
    thinking: bool | None
    lengths: Mapping[str, float]  # by task of the probes


def find_reference(drafter: str, block: int) -> Reference | None:
    """Return the figures of a published drafter's model card, at the nearest block size."""
    card = card_of_drafter(drafter)
    if card is None:
        return None
    near, stated = accept_lengths(card, block)
    like = {task: [stated[name] for name in names if name in stated] for task, names in _LIKE.items()}
    lengths = {task: fmean(found) for task, found in like.items() if found}
    return Reference(f"{card['card']}, block {near}", card["thinking"], lengths)


class Diagnosis:
    """The measurements of a server and its diagnosis.

    Attributes:
        measured: tokens per step of the baseline; of a full block if the width is adaptive.
        stated: the reference's accept length on the same tasks.
        guesses: whether the drafter seems not to match its target.
        survival: share of steps that committed draft j, for j = 1 ... block - 1.
    """

    def __init__(self, server: Server, probes: Sequence[Probe], card: Reference | None, partial: bool = False) -> None:
        self.server, self.probes, self.reference, self.partial = server, probes, card, partial
        first, lengths = probes[0], card.lengths if card else {}
        self.measured = first.accept_length(*lengths) or 0.0
        # the survival curve counts drafts only and contains a prior: use it for narrow blocks only
        if (first.width(server.block) or 0) < FULL * server.block:
            self.measured = max(self.measured, server.full_block or 0.0)
        self.stated = fmean(lengths.values()) if lengths else None
        self.guesses = self.measured < min(causes.GUESSING, (1 + server.block) / 2)
        self.is_low = self.guesses or self.measured < causes.LOW * (self.stated or 0.0)
        histograms = [meta["spec_correct_drafts_histogram"] for p in probes if not p.cause for _, meta in p.answers]
        steps = sum(map(sum, histograms))
        self.survival = [sum(sum(counts[j:]) for counts in histograms) / steps for j in range(1, server.block)]
        self.verdict = list(islice(_sentences(self), SENTENCES))

    def as_json(self) -> dict[str, Any]:
        probes = [probe.row(self.server.block) for probe in self.probes]
        figures = {"measured": self.measured, "stated": self.stated, "survival": self.survival, "partial": self.partial}
        return {"verdict": self.verdict, "server": vars(self.server), **figures, "probes": probes}

    def __str__(self) -> str:
        running, asked = map(self.server.requests.get, ("running", "asked"))
        word = "LOW ACCEPTANCE" if self.is_low else "PROBLEM" if self.verdict else "HEALTHY"
        stated = f"; {self.stated:.1f} by {self.reference.source}" if self.stated and self.reference else ""
        at_once = f", {running} of {asked} requests at once" if asked else ""
        shares = f"{self.survival[0]:.0%} to {self.survival[-1]:.0%}"
        bars = "".join(_BARS[min(int(share * len(_BARS)), len(_BARS) - 1)] for share in self.survival)
        lines = (
            f"\n  block {self.server.block}{', adaptive width' if self.server.adaptive else ''}{at_once}",
            f"  survival of drafts 1 to {len(bars)}: {bars} ({shares} of steps)\n",
            f"{'PARTIAL, as it was interrupted. ' * self.partial}{word}: {self.measured:.1f} tokens per step{stated}.",
            *(self.verdict or ["No problem was found."]),
        )
        return "\n".join(lines)


def _sentences(r: Diagnosis) -> Iterator[str]:
    s, has_template = r.server, r.probes[0].template
    if r.is_low:
        likely = [] if has_template else [Cause(causes.NO_SERVER_TEMPLATE)]
        likely += [Cause(name, s.known[name]) for name in causes.FIXES if name in s.known]
        # raw prompts do not show whether the drafter matches
        if has_template and not (r.guesses and causes.OTHER_TARGET in s.known):
            likely.append(Cause(causes.OTHER_TARGET if r.guesses else causes.DRAFTER))
        yield from (f"Too few drafts are accepted. Likely cause: {cause}." for cause in likely)
    else:
        if not has_template:
            yield f"Requests to /v1/chat/completions fail. Cause: {Cause(causes.NO_SERVER_TEMPLATE)}."
        if s.recent_cause:
            yield f"Drafting does not pay for recent requests. Likely cause: {s.recent_cause}."
        elif found := list(_recent_requests(r)):
            yield from found
        elif s.pays is False:
            yield f"Drafting does not pay for recent requests. Likely cause: {Cause(causes.DRAFTER)}."
        if causes.FLOAT16 in s.known:
            yield f"The pair runs in float16, though the probes are not affected. Fix: {causes.FIXES[causes.FLOAT16]}."
    running, asked, cap, raised_by = map(s.requests.get, ("running", "asked", "capped_by", "raised_by"))
    if running and running < asked:
        limited = f"{running} of {asked} requests (--max-running-requests) run at once"
        yield f"Only {limited}, limited by {cap}. Fix: use {raised_by}, or a higher --mem-fraction-static."


def _recent_requests(r: Diagnosis) -> Iterator[str]:
    # blame the variation whose accept length is nearest to that of recent requests
    length = r.server.recent_accept_length
    low = [(n, p) for p in r.probes if p.cause and (n := p.accept_length()) and n <= causes.LOW * r.measured]
    if length is None or not low:
        return
    found, nearest = min(low, key=lambda pair: abs(log(length / pair[0])))
    if length < sqrt(found * r.measured):
        likely = Cause(nearest.cause, f"the probe '{nearest.name}' gets {found:.1f}")
        best = f"{r.measured:.1f} is possible with the chat template"
        yield f"Recent requests got {length:.1f} tokens per step, {best}. Likely cause: {likely}."


async def diagnose(
    client: Client, max_tokens: int, long_tokens: int, seconds: float, report: Callable[[str], None]
) -> Diagnosis:
    """Probe and judge the server; after ``seconds``, a cancellation or SIGTERM, judge the answers so far.

    ``report`` receives the server's facts, then one line per probe.

    Raises:
        DFlashError: nothing that can be diagnosed.
    """
    server, planned, partial = Server(await client.server_info()), list[Probe](), True
    report("\n  ".join([f"{server.target} + {server.drafter}, served by {server.worker}", *server.facts]))
    if not server.has_drafter:
        raise DFlashError(
            "the server has no drafter to judge",
            remedy="none needed; the lines above show what the server drafts without one",
        )
    reference = find_reference(server.drafter, server.block)
    if (this := asyncio.current_task()) is not None:
        asyncio.get_running_loop().add_signal_handler(SIGTERM, this.cancel)
    with suppress(asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(seconds):
            notes = min(long_tokens, server.longest_notes)
            planned = await plan_probes(client, reference and reference.thinking, notes)
            await run_probe(client, trial := replace(planned[0], prompts=1), TRIAL)
            tokens, expected = fit(planned, trial, max_tokens, seconds / 2)
            prompts = sum(probe.prompts for probe in planned)
            report(
                f"Sending {prompts} prompts for answers of up to {tokens} tokens. This takes about {expected:.0f} s."
            )
            report("\n  probe               answers  tokens per step  width  tokens per second")
            for probe in planned:
                await run_probe(client, probe, tokens)
                name, answers, *row = probe.row(server.block).values()
                length, width, rate = (f"{figure:.2f}" if figure is not None else "-" for figure in row)
                report(f"  {name:20}{answers:>7}{length:>17}{width:>7}{rate:>19}")
                if probe is planned[0]:
                    after = Server(await client.server_info())
                    server.known, server.full_block = after.known, after.full_block
            partial = False
    if not (planned and planned[0].answers):
        raise DFlashError(
            f"no answer took a verify step{f' within {seconds:.0f} s or until the interruption' * partial}",
            remedy="send the server a prompt by hand; with no output there is nothing to draft",
        )
    return Diagnosis(server, [probe for probe in planned if probe.seconds], reference, partial)
