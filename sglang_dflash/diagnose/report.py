"""The findings as tables and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import isnan
from pathlib import Path
from typing import Any

from sglang_dflash.diagnose.cost import Load
from sglang_dflash.diagnose.probes import Probe
from sglang_dflash.diagnose.questions import TASKS
from sglang_dflash.diagnose.reference import Reference
from sglang_dflash.diagnose.tables import MISSING, Table
from sglang_dflash.diagnose.verdict import Findings, verdict

_CAPTIONS = {
    "accept length": "tokens per verify step, mean over answers; width: of a block",
    "survival": "share of steps that committed the draft at a position",
    "load": "at once: requests being answered, in the mean; step: decode time of a verify step",
}


@dataclass(frozen=True)
class Report:
    """Everything that was found.

    Attributes:
        probes: the reference probe first.
        survival: by draft position, from 1.
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
            "worker": "sglang-dflash" if s.ours else "SGLang's own",
            "target": "/".join(Path(s.target).parts[-2:]),
            "drafter": "/".join(Path(s.drafter).parts[-2:]),
            "card": f"{card.source}, block {card.block}" if card else MISSING,
            "dtype": s.dtype,
            "block": f"{s.block}{', at most' if s.adaptive else ''}",
            "requests at once": f"{s.running} of {s.asked} asked for, capped by {s.capped_by}",
            "copied blocks": s.copies or "off",
            "requests of others": f"{s.busy} run now",
            "accept length so far": _cell(s.so_far),
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
        return [Table("server", "", ["", "says"], [list(row) for row in server.items()]), *measured]

    def _measured(self) -> dict[str, list[dict[str, Any]]]:
        first, stated = self.probes[0], self.reference.lengths if self.reference else {}
        rows: list[tuple[str, Probe, list[str]]] = [(f"{first.name}: {task}", first, [task]) for task in TASKS]
        rows += [(probe.name, probe, []) for probe in self.probes[1:]]
        lengths = [
            {
                "probe": name,
                "prompts": len(probe.of(*tasks)),
                "accept length": _known(probe.accept_length(*tasks)),
                "card": stated.get(*tasks) if tasks else None,
                "width": _known(probe.width),
            }
            for name, probe, tasks in rows
        ]
        survival = {str(draft): share for draft, share in enumerate(self.survival, 1)}
        return {"accept length": lengths, "survival": [survival], "load": [asdict(load) for load in self.loads]}


def _known(value: float) -> float | None:
    """JSON has no NaN."""
    return None if isnan(value) else value


def _cell(value: Any) -> str:
    return MISSING if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
