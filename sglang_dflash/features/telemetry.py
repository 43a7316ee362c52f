"""Telemetry of the worker: figures of finished steps, and its identity."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from sglang.srt.runtime_context import get_serving
from torch import Tensor

from sglang_dflash import __version__
from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.features.feature import Feature, host_copy
from sglang_dflash.features.figures import BLOCKS, BROKEN, PAYS, RATE, STEPS, SURVIVAL, Figures
from sglang_dflash.features.payoff import Payoff
from sglang_dflash.features.step_width import Width
from sglang_dflash.width import AdaptiveWidth

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.launch.plan import ServingPlan
    from sglang_dflash.step.flight import Finished
    from sglang_dflash.step.step import Step


logger = logging.getLogger(__name__)

EVERY = 32  # steps between reads of non-finite counts, and between timed steps at a fixed width


class Telemetry(Feature):
    """Counts finished steps.

    ``not_finite``, int64 [] on the device, counts the drafter's non-finite positions: no other figure shows a broken
    drafter. ``payoff`` is None on a rank that does not log.
    """

    def __init__(self, width: Width, not_finite: Tensor, figures: Figures, payoff: Payoff | None = None) -> None:
        self._width, self._on_device, self._figures, self._payoff = width, not_finite, figures, payoff
        self._launched = 0
        figures.set(PAYS, True)  # the series exists from the start, and 0 is an alert
        self._versions = dict.fromkeys(("target", "draft"), get_serving().weight_version)

    def collect(self, step: Step) -> Tensor | None:
        self._launched += 1
        return host_copy(self._on_device) if self._launched % EVERY == 0 else None

    def read(self, finished: Finished, collected: Tensor | None) -> None:
        """Count a finished step, before the policy observes it."""
        policy, figures = self._width.policy, self._figures
        figures.count(STEPS, [finished.width])
        figures.count(BLOCKS, finished.accept_lens)
        if collected is not None:
            self._count_not_finite(int(collected))
        if self._payoff is not None:
            self._payoff.count(finished, policy, figures.totals[BROKEN])
        figures.set(PAYS, self._payoff is None or self._payoff.pays is not False)
        if figures.exported:
            for timed in finished.timed:
                if timed.tokens and timed.milliseconds:
                    figures.set(RATE, timed.tokens / timed.milliseconds, "measured")
            if isinstance(policy, AdaptiveWidth):
                figures.set(RATE, policy.tokens_per_ms, "predicted")
                for position, chance in enumerate(policy.survival.curve(), 1):
                    figures.set(SURVIVAL, chance, position)

    def forget(self, role: str, version: str | None) -> None:
        """Mark the drafter as stale after an update of the target to another ``weight_version``."""
        is_stale = role == "target" and version != self._versions["draft"]
        self._versions[role] = version or get_serving().weight_version
        if self._payoff is not None:
            evidence = "weight_version {target} of the target, {draft} of the drafter".format(**self._versions)
            self._payoff.forget(evidence if is_stale else None)

    def info(self) -> dict[str, Any]:
        """Return the figures and the judgement."""
        lengths = self._figures.counts[BLOCKS]
        tokens = sum(length * blocks for length, blocks in lengths.items())
        return {
            **self._figures.info(),
            "mean_accept_length": tokens / lengths.total() if lengths else None,
            "weight_versions": self._versions,
            "drafting": None if self._payoff is None else self._payoff.section(self._width.policy),
        }

    def _count_not_finite(self, total: int) -> None:
        if total and not self._figures.totals[BROKEN] and self._payoff is not None:
            logger.warning(
                "DFLASH: the drafter's output is not finite at %d drafted positions. Output is unaffected; these "
                "drafts are rejected. Fix: %s",
                total,
                FIXES[NOT_FINITE],
            )
        self._figures.set(BROKEN, total)


def identity(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner | None) -> dict[str, object]:
    return {
        "version": __version__,
        "target": target.model_config.model_path,
        "drafter": None if drafter is None else drafter.model_config.model_path,
        "dtype": str(target.model_config.dtype).removeprefix("torch."),
        "draft_attention_backend": None if drafter is None else drafter.draft_attention_backend,
        **plan.describe(),
    }
