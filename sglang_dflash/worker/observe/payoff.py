"""Whether drafting pays: one judgement, for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict
from time import monotonic
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, cheapest_step
from sglang_dflash.drafter.template import template_tokens
from sglang_dflash.upstream import get_server_args
from sglang_dflash.width import AdaptiveWidth, Prospect, WidthPolicy
from sglang_dflash.width.adaptive import SWITCH_NOW
from sglang_dflash.worker.observe import causes
from sglang_dflash.worker.observe.traits import Traits

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner
    from sglang_dflash.worker.observe.observer import StepRecord

logger = logging.getLogger(__name__)

Clock = Callable[[], float]

RECOVERED = 1.2
"""Times the accept length under which drafting does not pay: over that it pays again."""
ENOUGH = 256
"""Verified blocks before an accept length is judged."""
QUIET_SECONDS, LOOK_SECONDS = 3600.0, 60.0
"""Between two warnings of one cause, and between two looks at the causes while drafting does not pay."""


class Payoff:
    """Judges recent steps, and speaks up when drafting does not pay, once an hour for each cause.

    Args:
        recent: blocks by the traits of their requests.
        known: causes that hold for the whole server.
        clock: seconds.

    Attributes:
        pays: None before there is enough to judge by.
    """

    def __init__(
        self, recent: causes.RecentBlocks, known: Iterable[str], drafter: str, block: int, clock: Clock = monotonic
    ) -> None:
        self._recent, self._known, self._clock = recent, frozenset(known), clock
        card = card_of_drafter(drafter)
        # Without a cost table: at a lower accept length no published pair gains, not even for one user.
        self._break_even, self._card = cheapest_step(card, block), card and card_section(card, block)
        self.pays: bool | None = None
        self._broken = 0
        self._told: dict[str, float] = {}
        self._complained, self._next_look = False, 0.0

    def count(self, record: StepRecord, policy: WidthPolicy, broken: int) -> None:
        """Count a finished step; ``broken`` drafts so far."""
        self._recent.count(record)
        self._broken = broken
        self.pays, before = self._judged(policy), self.pays
        if self.pays is False and (before is not False or self._clock() >= self._next_look):
            self._complain(policy)
        elif self.pays and self._complained:
            self._complained = False
            logger.info("DFLASH: drafting pays again: %s", self._figures(policy))

    def section(self, policy: WidthPolicy) -> dict[str, Any]:
        """The part ``drafting`` of ``/server_info``, ready for JSON."""
        recent, prospect = self._recent.all, prospect_of(policy)
        return {
            "pays": self.pays,
            "accept_length": recent.accept_length,
            "first_drafts_accepted": recent.first_accepted,
            "break_even": prospect.cost if prospect else self._break_even,
            "judged_by": "costs" if prospect else "accept length",
            "card": self._card,
            "traits": {
                name: {
                    "share": theirs.number / (theirs.number + others.number),
                    "first_drafts_accepted": {"with": theirs.first_accepted, "without": others.first_accepted},
                }
                for name, (theirs, others) in self._recent.compare().items()
            },
            "causes": [asdict(cause) for cause in self._causes(policy)] if self.pays is False else [],
        }

    def _judged(self, policy: WidthPolicy) -> bool | None:
        if isinstance(policy, AdaptiveWidth) and policy.can_pause:
            return policy.paused is None
        length = self._recent.all.accept_length
        if length is None or self._recent.all.number < ENOUGH:
            return None
        return length >= self._break_even * (RECOVERED if self.pays is False else 1)

    def _causes(self, policy: WidthPolicy) -> list[causes.Cause]:
        known = set(self._known) | ({causes.BROKEN} if self._broken else set())
        alone = prospect_of(policy, alone=True)
        if alone and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            known.add(causes.LOAD)
        return causes.likely(self._recent.compare(), known, self._card["thinking"] if self._card else None)

    def _complain(self, policy: WidthPolicy) -> None:
        now = self._clock()
        self._next_look = now + LOOK_SECONDS
        cause, *others = self._causes(policy)
        if now - self._told.get(cause.cause, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._told[cause.cause], self._complained = now, True
        also = f". Possible too: {', '.join(other.cause for other in others)}" if others else ""
        logger.warning("DFLASH: drafting does not pay: %s. Most likely cause: %s%s", self._figures(policy), cause, also)

    def _figures(self, policy: WidthPolicy) -> str:
        length = f"accept length {self._recent.all.accept_length or 0:.2f} where published cards need"
        text = str(policy.paused or prospect_of(policy) or f"{length} {self._break_even:.2f} for one user to gain")
        if self._card and (lengths := self._card["accept_length"].values()):
            text += f"; {min(lengths)} to {max(lengths)} on the card of {self._card['drafter']} ({self._card['setup']})"
        return text


def prospect_of(policy: WidthPolicy, *, alone: bool = False) -> Prospect | None:
    """What a policy that knows its costs expects of drafting; None of any other policy."""
    return policy.prospect(alone=alone) if isinstance(policy, AdaptiveWidth) else None


def payoff(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Payoff:
    """The judgement of a server that starts; the pools exist."""
    args = get_server_args()
    template = template_tokens(ModelFiles(args.tokenizer_path or args.model_path, args.revision), args.chat_template)
    traits = Traits(template, causes.drafters_context(plan, target.model_config.context_len))
    recent = causes.RecentBlocks(traits, target.req_to_token_pool.size)
    return Payoff(recent, causes.known_causes(plan, target, drafter), plan.files.name, plan.drafted)


def card_section(card: dict[str, Any], block: int) -> dict[str, Any]:
    """What a card says, at its stated block nearest to ``block``."""
    near, lengths = accept_lengths(card, block)
    said = {key: card[key] for key in ("drafter", "card", "setup", "thinking")}
    return {**said, "block": near, "accept_length": lengths}
