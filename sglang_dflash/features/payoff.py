"""Whether drafting pays: one judgement for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash import causes
from sglang_dflash.causes import Cause
from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.adaptive import SWITCH_NOW

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.launch.plan import ServingPlan
    from sglang_dflash.step.flight import Finished

logger = logging.getLogger(__name__)

RECENT = 1024  # blocks after which all counts are halved


class Payoff:
    """Judge recent blocks without copies, and log each change of the judgement.

    ``known`` causes hold for the whole server. ``pays`` is None before a judgement.
    """

    def __init__(self, known: Mapping[str, str | None]) -> None:
        self._known, self._blocks, self._tokens = dict(known), 0.0, 0.0
        self.pays: bool | None = None
        self._logged = True

    @property
    def accept_length(self) -> float | None:
        return self._tokens / self._blocks if self._blocks else None

    def count(self, step: Finished, policy: WidthPolicy, not_finite: int) -> None:
        if step.width > 1:
            self._add(step)
        if not_finite:
            self._known[causes.NOT_FINITE] = f"{not_finite} positions"
        self.pays = self._judge(policy)
        if self.pays is not None and self.pays is not self._logged:
            self._logged = self.pays
            self._log(policy)

    def _add(self, step: Finished) -> None:
        for req, length, bucket in zip(step.requests, step.accept_lens, step.buckets or repeat(0), strict=False):
            # with overlap, a finished request runs one more step
            if req.finished_reason is None and not bucket:
                self._blocks += 1
                self._tokens += length
        if self._blocks >= RECENT:
            self._blocks, self._tokens = self._blocks / 2, self._tokens / 2

    def forget(self, stale: str | None) -> None:
        """Forget recent steps; ``stale`` is the evidence for a drafter older than its target."""
        self._blocks, self._tokens, self.pays = 0.0, 0.0, None
        known = self._known.pop(causes.STALE_DRAFTER, None)
        if stale is not None:
            self._known[causes.STALE_DRAFTER] = stale
            if known is None:
                logger.warning("DFLASH: %s", Cause(causes.STALE_DRAFTER, stale))

    def section(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return ``drafting`` of ``/server_info``."""
        gain = policy.expected_gain()
        return {
            "pays": self.pays,
            "accept_length": self.accept_length,
            "break_even": gain.cost if gain else causes.BREAK_EVEN,
            "known": self._known,
            "causes": [asdict(cause) for cause in self._causes(policy)] if self.pays is False else [],
        }

    def _judge(self, policy: WidthPolicy) -> bool | None:
        if policy.can_pause:
            return policy.paused is None
        length = self.accept_length
        if length is None or self._blocks < causes.ENOUGH:
            return None
        return length >= causes.BREAK_EVEN * (causes.RECOVERED if self.pays is False else 1)

    def _causes(self, policy: WidthPolicy) -> list[Cause]:
        found = {causes.DRAFTER: Cause(causes.DRAFTER)}
        found |= {name: Cause(name, evidence) for name, evidence in self._known.items()}
        alone = policy.expected_gain(alone=True)
        if alone and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            found[causes.LOAD] = Cause(causes.LOAD)
        return [found[name] for name in causes.FIXES if name in found]

    def _log(self, policy: WidthPolicy) -> None:
        gain = policy.paused or policy.expected_gain()
        figures = gain or f"accept length {self.accept_length:.2f} (one user gains from {causes.BREAK_EVEN})"
        if self.pays:
            logger.info("DFLASH: drafting pays again: %s", figures)
            return
        cause, *others = self._causes(policy)
        also = f". Other possible causes: {', '.join(other.cause for other in others)}" if others else ""
        logger.warning(
            "DFLASH: drafting does not pay: %s. Possible cause: %s%s. `sglang-dflash diagnose URL` measures the effect "
            "of chat template, thinking and sampling",
            *(figures, cause, also),
        )


def known_causes(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, str | None]:
    served, drafts = target.model_config, drafter.model_config
    found: dict[str, str | None] = {
        causes.QUANTISED_DRAFTER: plan.drafter.quantization or drafts.quantization,
        causes.QUANTISED_TARGET: served.quantization,
    }
    known = {name: evidence for name, evidence in found.items() if evidence}
    return known | (dict.fromkeys([causes.FLOAT16]) if torch.float16 in (served.dtype, drafts.dtype) else {})
