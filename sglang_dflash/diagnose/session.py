"""A diagnosis from the first question to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isnan
from statistics import mean

from sglang_dflash.diagnose import probes, reference, server
from sglang_dflash.diagnose.client import Client
from sglang_dflash.diagnose.cost import Load, narrower, survival
from sglang_dflash.diagnose.probes import Probe
from sglang_dflash.diagnose.reference import Reference
from sglang_dflash.diagnose.report import Report
from sglang_dflash.diagnose.server import Server
from sglang_dflash.diagnose.verdict import Findings, Other
from sglang_dflash.errors import DFlashError

FULL = 0.9  # share of the block's width from which a probe's accept length is taken for a full block's
_ROOM = 256  # tokens of a prompt beside its notes


async def diagnose(client: Client, max_tokens: int, long_tokens: int, say: Callable[[str], None]) -> Report:
    """Read the server, probe it, judge.

    Args:
        max_tokens: of an answer.
        long_tokens: of a long prompt, about.
        say: takes a line about each probe.

    Raises:
        DFlashError: nothing that can be diagnosed.
    """
    served = await server.read(client)
    known = reference.find(served.drafter, served.block)
    fits = min(long_tokens, served.longest_prompt - _ROOM)
    first, *more = await probes.plan(client, known.thinking if known else None, fits)
    first = await probes.run(client, first, served.block, max_tokens, say)
    if isnan(first.accept_length()):
        raise DFlashError(
            f"no answer of the probe {first.name!r} took a verify step",
            expected="answers of several tokens",
            remedy="ask the server something by hand: without an answer there is nothing to draft",
        )
    after = await server.read(client)  # the counts of this probe are in it, those of the others are not
    done = [await probes.run(client, probe, served.block, max_tokens, say) for probe in more]
    return judge(replace(after, so_far=served.so_far, unpaid=served.unpaid, busy=served.busy), [first, *done], known)


def judge(served: Server, done: Sequence[Probe], known: Reference | None) -> Report:
    """Put the measurements together.

    Args:
        done: the reference probe first, the one of several users last.
    """
    first, *others, together = done
    one, many = Load.of(first), Load.of(together)
    curve = survival((*first.requests, *together.requests), served.block)
    tasks = tuple(known.lengths) if known else ()
    findings = Findings(
        served,
        _of_a_full_block(served, first, tasks),
        (mean(known.lengths.values()), known.source) if known and tasks else None,
        has_template=first.template,
        other_target=reference.other_target(served.drafter, served.target),
        others=tuple(Other(p.name, p.accept_length(), p.change) for p in others if not isnan(p.accept_length())),
        narrower=None if served.adaptive else narrower(one, many, curve, served.block),
        users=together.users,
    )
    return Report(findings, done, known, curve, [one, many])


def _of_a_full_block(served: Server, probe: Probe, tasks: Sequence[str]) -> float:
    """Tokens of a full block: the probe's own, to which narrower blocks add by the server's survival of drafts.

    Survival leaves out blocks with a match and still contains its prior, so it does not replace a measurement.
    """
    own = probe.accept_length(*tasks)
    is_narrow = served.expected is not None and probe.width < FULL * served.block
    return max(own, served.expected or 0.0) if is_narrow else own
