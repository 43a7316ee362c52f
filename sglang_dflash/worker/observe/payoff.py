"""Whether drafting pays: one judgement, for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.files import ModelFiles
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, cheapest_step
from sglang_dflash.drafter.template import template_tokens
from sglang_dflash.upstream import get_server_args
from sglang_dflash.width import AdaptiveWidth, Prospect, WidthPolicy
from sglang_dflash.width.adaptive import SWITCH_NOW
from sglang_dflash.worker.observe.causes import (
    BROKEN,
    LOAD,
    Cause,
    RecentBlocks,
    drafters_context,
    known_causes,
    likely,
)
from sglang_dflash.worker.observe.traits import Traits

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner
    from sglang_dflash.worker.observe.observer import StepRecord

logger = logging.getLogger(__name__)

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
        card: the drafter's, as in :func:`card_section`, ; None if it is no published one.
        clock: seconds.

    Attributes:
        pays: None before there is enough to judge by.
    """

    def __init__(
        self,
        recent: RecentBlocks,
        known: Iterable[str],
        drafter: str,
        block: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._recent, self._known, self._clock = recent, frozenset(known), clock
        card = card_of_drafter(drafter)
        # Without a cost table: at a lower accept length no published pair gains, not even for one user.
        self._break_even, self._card = cheapest_step(card, block), card and card_section(card, block)
        self.pays: bool | None = None
        self._broken = 0
        self._step: tuple[int, int] | None = None  # batch size and context of the last one
        self._told: dict[str, float] = {}
        self._complained, self._next_look = False, 0.0

    def count(self, record: StepRecord, policy: WidthPolicy, broken: int) -> None:
        """Count a finished step; ``broken`` drafts so far."""
        self._recent.count(record)
        self._step, self._broken = (record.batch_size, record.context), broken
        self.pays, before = self._judged(policy), self.pays
        if self.pays is False and (before is not False or self._clock() >= self._next_look):
            self._complain(policy)
        elif self.pays and self._complained:
            self._complained = False
            logger.info("DFLASH: drafting pays again: %s", self._figures(policy))

    def section(self, policy: WidthPolicy) -> dict[str, Any]:
        """The part ``drafting`` of ``/server_info``, ready for JSON."""
        recent, prospect = self._recent.all, self._prospect(policy)
        by_costs = knows_costs(policy)
        return {
            "pays": self.pays,
            "accept_length": recent.accept_length,
            "first_drafts_accepted": recent.first_accepted,
            "break_even": (prospect and prospect.cost) if by_costs else self._break_even,
            "judged_by": "costs" if by_costs else "accept length",
            "card": self._card,
            "traits": {
                name: {
                    "share": theirs.number / (theirs.number + others.number),
                    "first_drafts_accepted": {"with": theirs.first_accepted, "without": others.first_accepted},
                }
                for name, (theirs, others) in self._recent.compare().items()
            },
            "causes": [cause.as_dict() for cause in self._causes(policy)] if self.pays is False else [],
        }

    def _judged(self, policy: WidthPolicy) -> bool | None:
        if knows_costs(policy):
            return policy.paused is None
        length = self._recent.all.accept_length
        if length is None or self._recent.all.number < ENOUGH:
            return None
        return length >= self._break_even * (RECOVERED if self.pays is False else 1)

    def _prospect(self, policy: WidthPolicy, *, alone: bool = False) -> Prospect | None:
        """For the last step; ``alone``: for one request of several."""
        if self._step is None or not isinstance(policy, AdaptiveWidth):
            return None
        size, context = self._step
        if alone:
            return policy.prospect(1, context // size) if size > 1 else None
        return policy.prospect(size, context)

    def _causes(self, policy: WidthPolicy) -> list[Cause]:
        known = set(self._known) | ({BROKEN} if self._broken else set())
        alone = self._prospect(policy, alone=True)
        if alone is not None and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            known.add(LOAD)
        return likely(self._recent.compare(), known, self._card["thinking"] if self._card else None)

    def _complain(self, policy: WidthPolicy) -> None:
        now = self._clock()
        self._next_look = now + LOOK_SECONDS
        cause, *others = self._causes(policy)
        if now - self._told.get(cause.name, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._told[cause.name], self._complained = now, True
        also = f". Possible too: {', '.join(other.name for other in others)}" if others else ""
        logger.warning("DFLASH: drafting does not pay: %s. Most likely cause: %s%s", self._figures(policy), cause, also)

    def _figures(self, policy: WidthPolicy) -> str:
        prospect = policy.paused or self._prospect(policy)
        if prospect is not None:
            text = str(prospect)
        else:
            need = f"where published cards need {self._break_even:.2f} for one user to gain"
            text = f"accept length {self._recent.all.accept_length:.2f} {need}"
        if self._card and (lengths := self._card["accept_length"].values()):
            text += f"; {min(lengths)} to {max(lengths)} on the card of {self._card['drafter']} ({self._card['setup']})"
        return text


def knows_costs(policy: WidthPolicy) -> bool:
    """Whether a policy knows what plain decoding would bring."""
    return isinstance(policy, AdaptiveWidth) and policy.widths[0] == 1


def payoff(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Payoff:
    """The judgement of a server that starts; the pools exist."""
    args = get_server_args()
    template = template_tokens(ModelFiles(args.tokenizer_path or args.model_path, args.revision), args.chat_template)
    traits = Traits(template, drafters_context(plan, target.model_config.context_len))
    recent = RecentBlocks(traits, target.req_to_token_pool.size)
    return Payoff(recent, known_causes(plan, target, drafter), plan.files.name, plan.block)


def card_section(card: dict[str, Any], block: int) -> dict[str, Any]:
    """What a card says, at its stated block nearest to ``block``."""
    near, lengths = accept_lengths(card, block)
    said = {key: card[key] for key in ("drafter", "card", "setup", "thinking")}
    return {**said, "block": near, "accept_length": lengths}
