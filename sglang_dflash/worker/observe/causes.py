"""Why drafts are refused: what recent requests show, and what the server itself is known for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from sglang_dflash.drafter.formats import FULL
from sglang_dflash.worker.observe.traits import BEYOND, GRAMMAR, LORA, NO_TEMPLATE, SAMPLING, THINKING, Traits

if TYPE_CHECKING:
    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream import ModelRunner, Req
    from sglang_dflash.worker.observe.observer import StepRecord

RECENT = 1024
"""Verified blocks that are remembered; then their counts are halved, so that traffic of long ago fades."""
COMPARED, DIFFERENCE = 32, 0.15
"""Blocks on either side of a comparison, and the share of first drafts by which one side must be accepted less."""
WELL = 0.5
"""Share of first drafts accepted on the other side from which the drafter itself is not to blame."""
MOST = 0.9
"""Share of recent blocks from which there is nothing to compare with: then a trait is suspected untested."""

BROKEN, LOAD, FLOAT16, QUANTISED_DRAFTER = "drafts not finite", "load", "float16", "quantised drafter"
DRAFTER, QUANTISED_TARGET = "drafter", "quantised target"

REMEDIES = {
    BROKEN: "compare the drafter's dtype and files with its card",
    LOAD: "none needed: it drafts again with fewer requests at once (--max-running-requests, or more replicas)",
    FLOAT16: "--dtype bfloat16: hidden states of many targets overflow float16",
    QUANTISED_DRAFTER: "--speculative-draft-model-path to the drafter's plain weights",
    NO_TEMPLATE: "ask /v1/chat/completions, or send prompts that the target's chat template has rendered",
    THINKING[True]: 'chat_template_kwargs: {"enable_thinking": false}',
    THINKING[False]: 'chat_template_kwargs: {"enable_thinking": true}',
    BEYOND: "shorter prompts (--context-length), or a wider --speculative-draft-window-size",
    LORA: "requests without lora_path, or a drafter trained on the adapter's answers",
    DRAFTER: "compare --speculative-draft-model-path and --speculative-draft-model-revision with its card",
    QUANTISED_TARGET: "--model-path to the target's plain weights, without --quantization",
    GRAMMAR: "describe the format in the prompt, so that the target itself would write what response_format allows",
    SAMPLING: "a lower temperature in sampling_params",
}
"""Every cause, in the order in which untested ones are suspected: those after ``drafter`` seldom cost so much alone."""


@dataclass
class Cause:
    """A likely cause.

    Attributes:
        evidence: how it was found; None for a mere suspicion.
        share: of recent blocks; None for what belongs to the server.
    """

    cause: str
    evidence: str | None = None
    share: float | None = None
    remedy: str = field(init=False)

    def __post_init__(self) -> None:
        self.remedy = REMEDIES[self.cause]

    def __str__(self) -> str:
        return f"{self.cause}{f' ({self.evidence})' if self.evidence else ''}: {self.remedy}"


class Blocks:
    """Counts of verified blocks: how many, their tokens, and those whose first draft was accepted."""

    __slots__ = "firsts", "number", "tokens"

    def __init__(self) -> None:
        self.number = self.tokens = self.firsts = 0.0

    @classmethod
    def sum(cls, parts: Iterable[Blocks]) -> Blocks:
        total = cls()
        for part in parts:
            total.number += part.number
            total.tokens += part.tokens
            total.firsts += part.firsts
        return total

    @property
    def accept_length(self) -> float | None:
        return self.tokens / self.number if self.number else None

    @property
    def first_accepted(self) -> float | None:
        """Share of first drafts that were accepted, which means the same at every width."""
        return self.firsts / self.number if self.number else None


class RecentBlocks:
    """Recent verified blocks by the traits of their requests.

    Args:
        traits: reads them.
        requests: that may run at once; a few more are remembered.
    """

    def __init__(self, traits: Traits, requests: int) -> None:
        self._traits, self._remembered = traits, 2 * requests
        self._groups: dict[frozenset[str], Blocks] = {}
        self._group_of: dict[tuple[str, bool], Blocks] = {}  # by request and whether it is beyond the context
        self.all = Blocks()

    def count(self, record: StepRecord) -> None:
        """Count a finished step whose requests are known; plain steps and copied blocks say nothing of the drafter."""
        if record.width == 1:
            return
        may_be_beyond = self._traits.context is not None
        matched = record.matched or [False] * len(record.requests)
        for req, length, is_matched in zip(record.requests, record.accept_lens, matched, strict=True):
            # A request's last step may be launched before the host sees its end.
            if req.finished_reason is not None or is_matched:
                continue
            key = req.rid, may_be_beyond and self._traits.is_beyond(req)
            blocks = self._group_of.get(key) or self._new(req, key)
            blocks.number += 1
            blocks.tokens += length
            blocks.firsts += length > 1
        self.all = Blocks.sum(self._groups.values())
        if self.all.number >= RECENT:
            for blocks in (*self._groups.values(), self.all):
                blocks.number, blocks.tokens, blocks.firsts = blocks.number / 2, blocks.tokens / 2, blocks.firsts / 2

    def _new(self, req: Req, key: tuple[str, bool]) -> Blocks:
        if len(self._group_of) >= self._remembered:
            del self._group_of[next(iter(self._group_of))]
        group = self._groups.setdefault(self._traits.of(req, beyond=key[1]), Blocks())
        self._group_of[key] = group
        return group

    def compare(self) -> dict[str, tuple[Blocks, Blocks]]:
        """Blocks of requests with and without each trait that occurred."""
        names = {name for traits, blocks in self._groups.items() if blocks.number >= 1 for name in traits}
        return {
            name: (
                Blocks.sum(blocks for traits, blocks in self._groups.items() if name in traits),
                Blocks.sum(blocks for traits, blocks in self._groups.items() if name not in traits),
            )
            for name in REMEDIES
            if name in names
        }


def likely(compared: Mapping[str, tuple[Blocks, Blocks]], known: Iterable[str], thinking: bool | None) -> list[Cause]:
    """Causes, most likely first: traits without which more drafts are accepted, then suspicions.

    The trait that explains most of the variance comes first, as a regression tree would split (Breiman et al., 1984): a
    trait that good requests have as well explains less.

    Args:
        known: causes that hold for the whole server.
        thinking: whether the drafter's card thinks; None if it does not say.
    """
    unstated = set(THINKING.values()) if thinking is None else set()
    found, suspected, shares = [], {*known, DRAFTER}, {}
    for name, (theirs, others) in compared.items():
        share = shares[name] = theirs.number / (theirs.number + others.number)
        if thinking is not None and name == THINKING[thinking]:  # as on the card
            continue
        if min(theirs.number, others.number) >= COMPARED:
            low, high = theirs.firsts / theirs.number, others.firsts / others.number
            if high >= max(low + DIFFERENCE, WELL):
                evidence = f"{share:.0%} of recent blocks; {low:.0%} of their first drafts accepted, else {high:.0%}"
                found.append((share * (1 - share) * (high - low) ** 2, Cause(name, evidence, share)))
        elif share >= MOST and name not in unstated:
            suspected.add(name)
    by_effect = [cause for _, cause in sorted(found, key=lambda pair: -pair[0])]
    return by_effect + [Cause(name, None, shares.get(name)) for name in REMEDIES if name in suspected]


def known_causes(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> frozenset[str]:
    """What a start knows of the two models."""
    configs = target.model_config, drafter.model_config
    holds = {
        FLOAT16: any(config.dtype == torch.float16 for config in configs),
        QUANTISED_TARGET: configs[0].quantization is not None,
        QUANTISED_DRAFTER: bool(plan.drafter.stored or plan.drafter.quantization or configs[1].quantization),
    }
    return frozenset(name for name, does in holds.items() if does)


def drafters_context(plan: ServingPlan, longest: int) -> int | None:
    """Tokens of context that the drafter reads or was configured for; None if as many as the target's ``longest``.

    Sliding layers read as far as they were trained to.
    """
    own = plan.drafter.max_position_embeddings
    if plan.window is not None and FULL in plan.drafter.layer_types:
        own = min(own, plan.window.tokens)
    return own if own < longest else None
