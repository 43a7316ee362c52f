"""Whether drafting pays: one judgement for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from time import monotonic
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
# between two warnings of one cause, and between two searches
QUIET_SECONDS, CHECK_SECONDS = 3600.0, 60.0


class RecentBlocks:
    def __init__(self) -> None:
        self.number = self.tokens = 0.0

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.number if self.number else None

    def count(self, step: Finished) -> None:
        if step.width == 1:
            return
        buckets = step.buckets or [0] * len(step.requests)
        for req, length, bucket in zip(step.requests, step.accept_lens, buckets, strict=True):
            # with overlap, a finished request is launched once more
            if req.finished_reason is None and not bucket:
                self.number += 1
                self.tokens += length
        if self.number >= RECENT:
            self.number, self.tokens = self.number / 2, self.tokens / 2


class Payoff:
    """Judges recent steps, and logs one warning per cause and hour while drafting does not pay.

    ``known`` causes hold for the whole server. ``pays`` is None before a judgement.
    """

    def __init__(self, known: Mapping[str, str | None], clock: Callable[[], float] = monotonic) -> None:
        self._recent, self._known, self._clock = RecentBlocks(), dict(known), clock
        self.pays: bool | None = None
        self._warned: dict[str, float] = {}
        self._has_warned, self._next_check = False, 0.0

    def count(self, step: Finished, policy: WidthPolicy, not_finite: int) -> None:
        self._recent.count(step)
        if not_finite:
            self._known[causes.NOT_FINITE] = f"{not_finite} positions"
        self.pays = self._judge(policy)
        if self.pays is False and self._clock() >= self._next_check:
            self._warn(policy)
        elif self.pays and self._has_warned:
            self._has_warned = False
            logger.info("DFLASH: drafting pays again: %s", self._figures(policy))

    def forget(self, stale: str | None) -> None:
        """Forget recent steps; ``stale`` is the evidence for a drafter older than its target."""
        self._recent, self.pays, known = RecentBlocks(), None, self._known.pop(causes.STALE_DRAFTER, None)
        if stale is not None:
            self._known[causes.STALE_DRAFTER] = stale
            if known is None:
                logger.warning("DFLASH: %s", Cause(causes.STALE_DRAFTER, stale))

    def section(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return ``drafting`` of ``/server_info``."""
        recent, prospect = self._recent, policy.prospect()
        return {
            "pays": self.pays,
            "accept_length": recent.accept_length,
            "break_even": prospect.cost if prospect else causes.BREAK_EVEN,
            "judged_by": "costs" if prospect else "accept length",
            "known": self._known,
            "causes": [asdict(cause) for cause in self._causes(policy)] if self.pays is False else [],
        }

    def _judge(self, policy: WidthPolicy) -> bool | None:
        if policy.can_pause:
            return policy.paused is None
        length = self._recent.accept_length
        if length is None or self._recent.number < causes.ENOUGH:
            return None
        return length >= causes.BREAK_EVEN * (causes.RECOVERED if self.pays is False else 1)

    def _causes(self, policy: WidthPolicy) -> list[Cause]:
        found = {causes.DRAFTER: Cause(causes.DRAFTER)}
        found |= {name: Cause(name, evidence) for name, evidence in self._known.items()}
        alone = policy.prospect(alone=True)
        if alone and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            found[causes.LOAD] = Cause(causes.LOAD)
        return [found[name] for name in causes.FIXES if name in found]

    def _warn(self, policy: WidthPolicy) -> None:
        now, (cause, *others) = self._clock(), self._causes(policy)
        self._next_check = now + CHECK_SECONDS
        if now - self._warned.get(cause.cause, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._warned[cause.cause], self._has_warned = now, True
        also = f". Other possible causes: {', '.join(other.cause for other in others)}" if others else ""
        logger.warning(
            "DFLASH: drafting does not pay: %s. Possible cause: %s%s. `sglang-dflash diagnose URL` measures the effect "
            "of chat template, thinking and sampling",
            *(self._figures(policy), cause, also),
        )

    def _figures(self, policy: WidthPolicy) -> str:
        length, prospect = self._recent.accept_length or 0.0, policy.paused or policy.prospect()
        return str(prospect or f"accept length {length:.2f} (one user gains from {causes.BREAK_EVEN})")


def known_causes(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, str | None]:
    served, drafts = target.model_config, drafter.model_config
    found: dict[str, str | None] = {
        causes.QUANTISED_DRAFTER: plan.drafter.quantization or drafts.quantization,
        causes.QUANTISED_TARGET: served.quantization,
    }
    known = {name: evidence for name, evidence in found.items() if evidence}
    return known | (dict.fromkeys([causes.FLOAT16]) if torch.float16 in (served.dtype, drafts.dtype) else {})
