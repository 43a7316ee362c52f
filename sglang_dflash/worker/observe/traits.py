"""What a request shows that may keep its drafts from being accepted. Read on the host, once for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sglang_dflash.drafter.template import TemplateTokens

if TYPE_CHECKING:
    from sglang_dflash.upstream import Req

NO_TEMPLATE, THINKING_ON, THINKING_OFF = "no chat template", "thinking on", "thinking off"
BEYOND, LORA, GRAMMAR, SAMPLING = "context beyond the drafter's", "LoRA adapter", "grammar", "sampling"

_HEAD, _TAIL = 8, 32  # tokens: a template opens its first turn in the one, and the answer's turn in the other
_FIRST = 4  # generated tokens among which a thought begins, if the prompt does not begin it


@dataclass(frozen=True)
class Traits:
    """Reads a request's traits.

    Args:
        template: of the target.
        context: tokens of context that the drafter reads, or was configured for; None if as many as the target.
    """

    template: TemplateTokens
    context: int | None

    def of(self, req: Req, *, beyond: bool) -> frozenset[str]:
        """The traits of a request whose first token is known.

        Args:
            beyond: as :meth:`is_beyond`, which changes while a request runs.
        """
        head, tail = req.origin_input_ids[:_HEAD], list(req.origin_input_ids[-_TAIL:])
        is_raw = bool(self.template.markers) and self.template.markers.isdisjoint((*head, *tail))
        shows = {
            NO_TEMPLATE: is_raw,
            BEYOND: beyond,
            LORA: req.lora_id is not None,
            GRAMMAR: req.grammar is not None,
            SAMPLING: req.sampling_params.top_k != 1,  # SGLang's form of temperature 0
        }
        if self.template.think is not None and not is_raw:
            shows[THINKING_ON if self._thinks([*tail, *req.output_ids[:_FIRST]]) else THINKING_OFF] = True
        return frozenset(trait for trait, shown in shows.items() if shown)

    def is_beyond(self, req: Req) -> bool:
        return self.context is not None and len(req.origin_input_ids) + len(req.output_ids) > self.context

    def _thinks(self, tokens: list[int]) -> bool:
        """Whether the last thought was not closed."""
        assert self.template.think is not None
        begin, end = self.template.think
        return next((token == begin for token in reversed(tokens) if token in (begin, end)), False)
