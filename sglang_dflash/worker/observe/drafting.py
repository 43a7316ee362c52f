"""Whether drafting pays, and why not: one judgement for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash import causes
from sglang_dflash.causes import Cause
from sglang_dflash.drafter.formats import FULL
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, cheapest_step, published_pairs
from sglang_dflash.drafter.template import TemplateTokens
from sglang_dflash.width import AdaptiveWidth, Prospect, WidthPolicy
from sglang_dflash.width.adaptive import SWITCH_NOW
from sglang_dflash.worker.observe.metrics import StepRecord

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream.worker import ModelRunner, Req

logger = logging.getLogger(__name__)

RECENT = 1024  # verified blocks after which all counts are halved, so that old traffic fades
# Least time between two warnings of one cause, and between two searches for causes while drafting does not pay
QUIET_SECONDS, CHECK_SECONDS = 3600.0, 60.0
_HEAD, _TAIL = 8, 32  # prompt tokens that hold a template's first turn, and the beginning of the answer's turn
_FIRST = 4  # output tokens that hold the beginning of a thought, if the prompt does not


def traits_of(req: Req, template: TemplateTokens, *, beyond: bool) -> frozenset[str]:
    """Return the properties of a request that may lower its acceptance.

    Args:
        req: a request whose first output token is known.
        template: the target's.
        beyond: whether the request is longer than the drafter's context.
    """
    head, tail = req.origin_input_ids[:_HEAD], list(req.origin_input_ids[-_TAIL:])
    is_raw = bool(template.markers) and template.markers.isdisjoint((*head, *tail))
    shows = {
        causes.NO_TEMPLATE: is_raw,
        causes.CONTEXT: beyond,
        causes.LORA: req.lora_id is not None,
        causes.GRAMMAR: req.grammar is not None,
        causes.SAMPLING: req.sampling_params.top_k != 1,  # SGLang serves temperature 0 as top_k 1
    }
    if template.think is not None and not is_raw:
        begin, end = template.think
        tokens = [*tail, *req.output_ids[:_FIRST]]
        is_open = next((token == begin for token in reversed(tokens) if token in (begin, end)), False)
        shows[causes.THINKING[is_open]] = True
    return frozenset(trait for trait, shown in shows.items() if shown)


@dataclass
class Blocks:
    """Counts of verified blocks, of their tokens, and of blocks whose first draft was accepted."""

    number: float = 0.0
    tokens: float = 0.0
    firsts: float = 0.0

    def __sub__(self, other: Blocks) -> Blocks:
        return Blocks(self.number - other.number, self.tokens - other.tokens, self.firsts - other.firsts)

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.number if self.number else None

    @property
    def first_accepted(self) -> float | None:
        """Share of first drafts that were accepted: comparable between widths."""
        return self.firsts / self.number if self.number else None


class RecentBlocks:
    """Recent verified blocks, in all and by trait of their requests.

    Args:
        template: the target's.
        context: tokens of context that the drafter reads or was configured for; None if as many as the target.
        max_requests: running requests; twice as many are remembered.
    """

    def __init__(self, template: TemplateTokens, context: int | None, max_requests: int) -> None:
        self._template, self._context, self._remembered = template, context, 2 * max_requests
        self.all, self._by_trait = Blocks(), dict[str, Blocks]()
        self._of_request: dict[tuple[str, bool], list[Blocks]] = {}  # by request, and whether it is beyond the context

    def count(self, record: StepRecord) -> None:
        """Count a finished step that has its requests; plain steps and blocks with a match are left out."""
        if record.width == 1:
            return
        matched = record.matched or [False] * len(record.requests)
        for req, length, is_matched in zip(record.requests, record.accept_lens, matched, strict=True):
            # With overlap, a finished request is launched once more.
            if req.finished_reason is None and not is_matched:
                for blocks in self._counts_of(req):
                    blocks.number += 1
                    blocks.tokens += length
                    blocks.firsts += length > 1
        if self.all.number >= RECENT:
            for blocks in (self.all, *self._by_trait.values()):
                blocks.number /= 2
                blocks.tokens /= 2
                blocks.firsts /= 2

    def _counts_of(self, req: Req) -> list[Blocks]:
        length = len(req.origin_input_ids) + len(req.output_ids)
        key = req.rid, self._context is not None and length > self._context  # changes while a request runs
        if key not in self._of_request:
            if len(self._of_request) >= self._remembered:
                del self._of_request[next(iter(self._of_request))]
            traits = traits_of(req, self._template, beyond=key[1])
            self._of_request[key] = [self.all, *(self._by_trait.setdefault(trait, Blocks()) for trait in traits)]
        return self._of_request[key]

    def compare(self) -> dict[str, tuple[float, Blocks, Blocks]]:
        """Return, for each trait that occurred: share of the blocks, blocks with it, and blocks without it."""
        return {
            name: (theirs.number / self.all.number, theirs, self.all - theirs)
            for name in causes.FIXES
            if (theirs := self._by_trait.get(name)) and theirs.number >= 1
        }

    def undecided(self) -> bool:
        """Whether a trait of recent requests, but not of nearly all, has too few blocks to be compared."""
        return any(
            share < causes.NEARLY_ALL and min(theirs.number, others.number) < causes.COMPARED
            for share, theirs, others in self.compare().values()
        )


class Payoff:
    """Judges recent steps, and logs one warning per cause and hour while drafting does not pay.

    Args:
        known: causes that hold for the whole server, with their evidence.
        drafter: path or repository.
        block: positions of a drafted block.
        clock: returns seconds.

    Attributes:
        pays: None until enough blocks were verified.
    """

    def __init__(
        self,
        recent: RecentBlocks,
        known: Mapping[str, str | None],
        drafter: str,
        block: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._recent, self._known, self._clock = recent, dict(known), clock
        card = card_of_drafter(drafter)
        # A fixed width has no cost table. No published pair gains below this accept length, even for one user.
        self._break_even, self._card = cheapest_step(card, block), card and _card_section(card, block)
        self.pays: bool | None = None
        self._warned: dict[str, float] = {}
        self._has_warned, self._next_check, self._waited = False, 0.0, 0

    def count(self, record: StepRecord, policy: WidthPolicy, not_finite: int) -> None:
        """Count a finished step; ``not_finite`` is the number of such drafts since the start."""
        self._recent.count(record)
        if not_finite:
            self._known[causes.NOT_FINITE] = f"{not_finite} positions"
        self.pays = self._judge(policy)
        if self.pays is not False:
            self._next_check, self._waited = 0.0, 0
            if self.pays and self._has_warned:
                self._has_warned = False
                logger.info("DFLASH: drafting pays again: %s", self._figures(policy))
        elif self._clock() >= self._next_check:
            # A trait with too few blocks to be compared may be the cause: the next blocks decide it.
            self._waited += len(record.requests) if record.width > 1 else 0
            if self._waited >= causes.COMPARED or not self._recent.undecided():
                self._warn(policy)

    def section(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return the part ``drafting`` of ``/server_info``, ready for JSON."""
        recent, prospect = self._recent.all, _prospect(policy)
        return {
            "pays": self.pays,
            "accept_length": recent.accept_length,
            "first_drafts_accepted": recent.first_accepted,
            "break_even": prospect.cost if prospect else self._break_even,
            "judged_by": "costs" if prospect else "accept length",
            "card": self._card,
            "traits": {
                name: {
                    "share": share,
                    "first_drafts_accepted": {"with": theirs.first_accepted, "without": others.first_accepted},
                }
                for name, (share, theirs, others) in self._recent.compare().items()
            },
            "known": self._known,
            "causes": [asdict(cause) for cause in self._causes(policy)] if self.pays is False else [],
        }

    def _judge(self, policy: WidthPolicy) -> bool | None:
        if isinstance(policy, AdaptiveWidth) and policy.can_pause:
            return policy.paused is None
        length = self._recent.all.accept_length
        if length is None or self._recent.all.number < causes.ENOUGH:
            return None
        return length >= self._break_even * (causes.RECOVERED if self.pays is False else 1)

    def _causes(self, policy: WidthPolicy) -> list[Cause]:
        """Return causes, most likely first: traits that lower acceptance, then suspicions.

        Traits are ordered by the variance that they explain, as in a regression tree's split (Breiman et al., 1984).
        """
        suspected = {name: Cause(name, evidence) for name, evidence in self._known.items()}
        suspected.setdefault(causes.DRAFTER, Cause(causes.DRAFTER))
        alone = _prospect(policy, alone=True)
        if alone and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            suspected[causes.LOAD] = Cause(causes.LOAD)
        # A card that does not state its thinking makes no suspicion of it. A stated one is no cause.
        thinking, compared = self._card["thinking"] if self._card else None, self._recent.compare()
        unstated = set(causes.THINKING.values()) if thinking is None else set()
        if thinking is not None:
            compared.pop(causes.THINKING[thinking], None)
        found = list[tuple[float, Cause]]()
        for name, (share, theirs, others) in compared.items():
            if min(theirs.number, others.number) >= causes.COMPARED:
                low, high = theirs.first_accepted or 0.0, others.first_accepted or 0.0
                if high >= max(low + causes.DIFFERENCE, causes.GOOD):
                    evidence = f"{share:.0%} of recent blocks; first drafts accepted: {low:.0%}, without it {high:.0%}"
                    found.append((share * (1 - share) * (high - low) ** 2, Cause(name, evidence, share)))
            elif share >= causes.NEARLY_ALL and name not in unstated:
                suspected[name] = Cause(name, None, share)
        by_effect = [cause for _, cause in sorted(found, key=lambda pair: -pair[0])]
        return by_effect + [suspected[name] for name in causes.FIXES if name in suspected]

    def _warn(self, policy: WidthPolicy) -> None:
        now = self._clock()
        self._next_check = now + CHECK_SECONDS
        cause, *others = self._causes(policy)
        if now - self._warned.get(cause.cause, -QUIET_SECONDS) < QUIET_SECONDS:
            return
        self._warned[cause.cause], self._has_warned = now, True
        also = f". Other possible causes: {', '.join(other.cause for other in others)}" if others else ""
        logger.warning("DFLASH: drafting does not pay: %s. Most likely cause: %s%s", self._figures(policy), cause, also)

    def _figures(self, policy: WidthPolicy) -> str:
        length, prospect = self._recent.all.accept_length or 0.0, policy.paused or _prospect(policy)
        text = str(prospect or f"accept length {length:.2f} (one user gains from {self._break_even:.2f})")
        if self._card and (lengths := self._card["accept_length"].values()):
            text += f"; the card of {self._card['drafter']} states {min(lengths)} to {max(lengths)}"
            text += f" ({self._card['setup']})"
        return text


def payoff(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> Payoff:
    """Build the judgement of a server whose pools are allocated."""
    context = _drafter_context(plan, target.model_config.context_len)
    recent = RecentBlocks(plan.template, context, target.req_to_token_pool.size)
    return Payoff(recent, known_causes(plan, target, drafter), plan.files.name, plan.drafted)


def known_causes(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, str | None]:
    """Return the causes that the two models' configurations show at the start, with their evidence."""
    served, drafts = target.model_config, drafter.model_config
    other = other_target(plan.files.name, served.model_path)
    found: dict[str, str | None] = {
        causes.QUANTISED_DRAFTER: plan.drafter.quantization or drafts.quantization,
        causes.OTHER_TARGET: other and f"its target is {other}",
        causes.QUANTISED_TARGET: served.quantization,
    }
    if plan.drafter.stored:
        found[causes.QUANTISED_DRAFTER] = "dequantised at load"
    known = {name: evidence for name, evidence in found.items() if evidence}
    return known | (dict.fromkeys([causes.FLOAT16]) if torch.float16 in (served.dtype, drafts.dtype) else {})


def other_target(drafter: str, target: str) -> str | None:
    """Return the target of a published drafter if the server runs another published target."""
    card, served = card_of_drafter(drafter), Path(target).name.lower()
    others = {Path(other["target"]).name.lower() for other in published_pairs().values() if other is not card}
    return str(card["target"]) if card and served in others else None


def _drafter_context(plan: ServingPlan, longest: int) -> int | None:
    context = plan.drafter.max_position_embeddings
    # Sliding layers do not limit the context: they were trained with their window.
    if plan.window is not None and FULL in plan.drafter.layer_types:
        context = min(context, plan.window.tokens)
    return context if context < longest else None


def _prospect(policy: WidthPolicy, *, alone: bool = False) -> Prospect | None:
    # None for a policy without a cost table, or without plain decoding among its widths.
    return policy.prospect(alone=alone) if isinstance(policy, AdaptiveWidth) else None


def _card_section(card: dict[str, Any], block: int) -> dict[str, Any]:
    near, lengths = accept_lengths(card, block)
    stated = {key: card[key] for key in ("drafter", "card", "setup", "thinking")}
    return {**stated, "block": near, "accept_length": lengths}
