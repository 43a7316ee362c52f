"""Why drafts are refused: what recent requests show, and what the server itself is known for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sglang_dflash.drafter.keys import FULL
from sglang_dflash.worker.observe.traits import (
    BEYOND,
    GRAMMAR,
    LORA,
    NO_TEMPLATE,
    SAMPLING,
    THINKING_OFF,
    THINKING_ON,
    Traits,
)

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
    THINKING_ON: 'chat_template_kwargs: {"enable_thinking": false}',
    THINKING_OFF: 'chat_template_kwargs: {"enable_thinking": true}',
    BEYOND: "shorter prompts (--context-length), or a wider --speculative-draft-window-size",
    LORA: "requests without lora_path, or a drafter trained on the adapter's answers",
    DRAFTER: "compare --speculative-draft-model-path and --speculative-draft-model-revision with its card",
    QUANTISED_TARGET: "--model-path to the target's plain weights, without --quantization",
    GRAMMAR: "describe the format in the prompt, so that the target itself would write what response_format allows",
    SAMPLING: "a lower temperature in sampling_params",
}
"""Every cause, in the order in which untested ones are suspected: those after ``drafter`` seldom cost so much alone."""


@dataclass(frozen=True)
class Cause:
    """A likely cause.

    Attributes:
        evidence: how it was found, for the log; None for a mere suspicion.
        share: of recent blocks; None for what belongs to the server.
    """

    name: str
    evidence: str | None = None
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.name}{f' ({self.evidence})' if self.evidence else ''}: {REMEDIES[self.name]}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "cause": self.name,
            "evidence": "comparison" if self.evidence else "suspicion",
            "share": self.share,
            "remedy": REMEDIES[self.name],
        }


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
        """Count a finished step, whose requests are known; a plain step shows nothing."""
        if record.width == 1:
            return
        may_be_beyond = self._traits.context is not None
        for req, length in zip(record.requests, record.accept_lens, strict=True):
            if req.finished_reason is not None:  # its last step was launched before the host saw its end
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

    Args:
        known: causes that hold for the whole server.
        thinking: whether the drafter's card thinks; None if it does not say.
    """
    as_on_card = None if thinking is None else THINKING_ON if thinking else THINKING_OFF
    unstated = {THINKING_ON, THINKING_OFF} if thinking is None else set()
    found, suspected, shares = [], {*known, DRAFTER}, {}
    for name, (theirs, others) in compared.items():
        share = shares[name] = theirs.number / (theirs.number + others.number)
        if name == as_on_card:
            continue
        if min(theirs.number, others.number) >= COMPARED:
            low, high = theirs.firsts / theirs.number, others.firsts / others.number
            if high >= max(low + DIFFERENCE, WELL):
                evidence = f"{share:.0%} of recent blocks; {low:.0%} of their first drafts accepted, else {high:.0%}"
                found.append((share * (high - low), Cause(name, evidence, share)))
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
        QUANTISED_DRAFTER: bool(plan.drafter.quantization or configs[1].quantization),
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
