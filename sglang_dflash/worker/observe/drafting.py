"""Whether drafting pays, and why not: one judgement for the log, ``/metrics`` and ``/server_info``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash import causes
from sglang_dflash.causes import Cause
from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.formats import FULL
from sglang_dflash.drafter.published import accept_lengths, card_of_drafter, cheapest_step
from sglang_dflash.drafter.template import TemplateTokens, template_tokens
from sglang_dflash.upstream import get_server_args
from sglang_dflash.width import AdaptiveWidth, Prospect, WidthPolicy
from sglang_dflash.width.adaptive import SWITCH_NOW
from sglang_dflash.worker.observe.metrics import StepRecord

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner, Req

logger = logging.getLogger(__name__)

RECENT = 1024
"""Verified blocks after which all counts are halved, so that old traffic fades."""
QUIET_SECONDS, CHECK_SECONDS = 3600.0, 60.0
"""Least time between two warnings of one cause, and between two searches for causes while drafting does not pay."""
_HEAD, _TAIL = 8, 32  # prompt tokens that hold a template's first turn, and the beginning of the answer's turn
_FIRST = 4  # output tokens that hold the beginning of a thought, if the prompt does not


@dataclass(frozen=True)
class Traits:
    """Reads properties of a request that may lower its acceptance.

    Args:
        template: the target's.
        context: tokens of context that the drafter reads or was configured for; None if as many as the target.
    """

    template: TemplateTokens
    context: int | None

    def of(self, req: Req, *, beyond: bool) -> frozenset[str]:
        """Return the traits of a request whose first token is known; ``beyond`` is :meth:`is_beyond`."""
        head, tail = req.origin_input_ids[:_HEAD], list(req.origin_input_ids[-_TAIL:])
        is_raw = bool(self.template.markers) and self.template.markers.isdisjoint((*head, *tail))
        shows = {
            causes.NO_TEMPLATE: is_raw,
            causes.CONTEXT: beyond,
            causes.LORA: req.lora_id is not None,
            causes.GRAMMAR: req.grammar is not None,
            causes.SAMPLING: req.sampling_params.top_k != 1,  # SGLang serves temperature 0 as top_k 1
        }
        if self.template.think is not None and not is_raw:
            begin, end = self.template.think
            tokens = [*tail, *req.output_ids[:_FIRST]]
            is_open = next((token == begin for token in reversed(tokens) if token in (begin, end)), False)
            shows[causes.THINKING[is_open]] = True
        return frozenset(trait for trait, shown in shows.items() if shown)

    def is_beyond(self, req: Req) -> bool:
        """Return whether the request is longer than the drafter's context, which changes while it runs."""
        return self.context is not None and len(req.origin_input_ids) + len(req.output_ids) > self.context


@dataclass
class Blocks:
    """Counts of verified blocks, of their tokens, and of blocks whose first draft was accepted."""

    number: float = 0.0
    tokens: float = 0.0
    firsts: float = 0.0

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(self.number + other.number, self.tokens + other.tokens, self.firsts + other.firsts)

    def halve(self) -> None:
        self.number, self.tokens, self.firsts = self.number / 2, self.tokens / 2, self.firsts / 2

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.number if self.number else None

    @property
    def first_accepted(self) -> float | None:
        """Share of first drafts that were accepted: comparable between widths."""
        return self.firsts / self.number if self.number else None


class RecentBlocks:
    """Recent verified blocks, grouped by the traits of their requests.

    Args:
        max_requests: running requests; twice as many are remembered.
    """

    def __init__(self, traits: Traits, max_requests: int) -> None:
        self._traits, self._remembered = traits, 2 * max_requests
        self._groups: dict[frozenset[str], Blocks] = {}
        self._group_of: dict[tuple[str, bool], Blocks] = {}  # by request, and whether it is beyond the context
        self.all = Blocks()

    def count(self, record: StepRecord) -> None:
        """Count a finished step that has its requests; plain steps and blocks with a match are left out."""
        if record.width == 1:
            return
        matched = record.matched or [False] * len(record.requests)
        for req, length, is_matched in zip(record.requests, record.accept_lens, matched, strict=True):
            # With overlap, a finished request is launched once more.
            if req.finished_reason is not None or is_matched:
                continue
            key = req.rid, self._traits.is_beyond(req)
            blocks = self._group_of.get(key) or self._new(req, key)
            blocks.number += 1
            blocks.tokens += length
            blocks.firsts += length > 1
        if sum(group.number for group in self._groups.values()) >= RECENT:
            for group in self._groups.values():
                group.halve()
        self.all = sum(self._groups.values(), Blocks())

    def _new(self, req: Req, key: tuple[str, bool]) -> Blocks:
        if len(self._group_of) >= self._remembered:
            del self._group_of[next(iter(self._group_of))]
        group = self._groups.setdefault(self._traits.of(req, beyond=key[1]), Blocks())
        self._group_of[key] = group
        return group

    def compare(self) -> dict[str, tuple[Blocks, Blocks]]:
        """Return, for each trait that occurred, the blocks of requests with it and without it."""
        names = {name for traits, blocks in self._groups.items() if blocks.number >= 1 for name in traits}
        groups = self._groups.items()
        return {
            name: (
                sum((blocks for traits, blocks in groups if name in traits), Blocks()),
                sum((blocks for traits, blocks in groups if name not in traits), Blocks()),
            )
            for name in causes.FIXES
            if name in names
        }


def likely(compared: Mapping[str, tuple[Blocks, Blocks]], known: Iterable[str], thinking: bool | None) -> list[Cause]:
    """Return causes, most likely first: traits that lower acceptance, then suspicions.

    Traits are ordered by the variance that they explain, as in a regression tree's split (Breiman et al., 1984): a
    trait that well-drafted requests share explains less.

    Args:
        known: causes that hold for the whole server.
        thinking: whether the drafter's card was measured with thinking; None if it does not state it.
    """
    unstated = set(causes.THINKING.values()) if thinking is None else set()
    found, suspected, shares = [], {*known, causes.DRAFTER}, {}
    for name, (theirs, others) in compared.items():
        share = shares[name] = theirs.number / (theirs.number + others.number)
        if thinking is not None and name == causes.THINKING[thinking]:  # as on the card
            continue
        if min(theirs.number, others.number) >= causes.COMPARED:
            low, high = theirs.firsts / theirs.number, others.firsts / others.number
            if high >= max(low + causes.DIFFERENCE, causes.GOOD):
                evidence = f"{share:.0%} of recent blocks; first drafts accepted: {low:.0%}, without it {high:.0%}"
                found.append((share * (1 - share) * (high - low) ** 2, Cause(name, evidence, share)))
        elif share >= causes.NEARLY_ALL and name not in unstated:
            suspected.add(name)
    by_effect = [cause for _, cause in sorted(found, key=lambda pair: -pair[0])]
    return by_effect + [Cause(name, None, shares.get(name)) for name in causes.FIXES if name in suspected]


class Payoff:
    """Judges recent steps, and logs one warning per cause and hour while drafting does not pay.

    Args:
        known: causes that hold for the whole server.
        drafter: path or repository.
        block: positions of a drafted block.
        clock: returns seconds.

    Attributes:
        pays: None until enough blocks were verified.
    """

    def __init__(
        self,
        recent: RecentBlocks,
        known: Iterable[str],
        drafter: str,
        block: int,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._recent, self._known, self._clock = recent, frozenset(known), clock
        card = card_of_drafter(drafter)
        # A fixed width has no cost table. No published pair gains below this accept length, even for one user.
        self._break_even, self._card = cheapest_step(card, block), card and _card_section(card, block)
        self.pays: bool | None = None
        self._not_finite = 0
        self._warned: dict[str, float] = {}
        self._has_warned, self._next_check = False, 0.0

    def count(self, record: StepRecord, policy: WidthPolicy, not_finite: int) -> None:
        """Count a finished step; ``not_finite`` is the number of such drafts since the start."""
        self._recent.count(record)
        self._not_finite = not_finite
        self.pays, before = self._judge(policy), self.pays
        if self.pays is False and (before is not False or self._clock() >= self._next_check):
            self._warn(policy)
        elif self.pays and self._has_warned:
            self._has_warned = False
            logger.info("DFLASH: drafting pays again: %s", self._figures(policy))

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
                    "share": theirs.number / (theirs.number + others.number),
                    "first_drafts_accepted": {"with": theirs.first_accepted, "without": others.first_accepted},
                }
                for name, (theirs, others) in self._recent.compare().items()
            },
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
        known = set(self._known) | ({causes.NOT_FINITE} if self._not_finite else set())
        alone = _prospect(policy, alone=True)
        if alone and alone.tokens > (1 + SWITCH_NOW) * alone.cost:
            known.add(causes.LOAD)
        return likely(self._recent.compare(), known, self._card["thinking"] if self._card else None)

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
    args = get_server_args()
    template = template_tokens(ModelFiles(args.tokenizer_path or args.model_path, args.revision), args.chat_template)
    traits = Traits(template, drafter_context(plan, target.model_config.context_len))
    recent = RecentBlocks(traits, target.req_to_token_pool.size)
    return Payoff(recent, known_causes(plan, target, drafter), plan.files.name, plan.drafted)


def known_causes(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> frozenset[str]:
    """Return the causes that the two models' configurations show at the start."""
    configs = target.model_config, drafter.model_config
    holds = {
        causes.FLOAT16: any(config.dtype == torch.float16 for config in configs),
        causes.QUANTISED_TARGET: configs[0].quantization is not None,
        causes.QUANTISED_DRAFTER: bool(plan.drafter.stored or plan.drafter.quantization or configs[1].quantization),
    }
    return frozenset(name for name, does in holds.items() if does)


def drafter_context(plan: ServingPlan, longest: int) -> int | None:
    """Return the tokens of context that the drafter reads or was configured for; None if ``longest`` or more.

    Sliding layers do not limit it: they were trained with their window.
    """
    context = plan.drafter.max_position_embeddings
    if plan.window is not None and FULL in plan.drafter.layer_types:
        context = min(context, plan.window.tokens)
    return context if context < longest else None


def _prospect(policy: WidthPolicy, *, alone: bool = False) -> Prospect | None:
    """Return what a policy with a cost table and plain decoding among its widths expects of drafting."""
    return policy.prospect(alone=alone) if isinstance(policy, AdaptiveWidth) else None


def _card_section(card: dict[str, Any], block: int) -> dict[str, Any]:
    near, lengths = accept_lengths(card, block)
    stated = {key: card[key] for key in ("drafter", "card", "setup", "thinking")}
    return {**stated, "block": near, "accept_length": lengths}
