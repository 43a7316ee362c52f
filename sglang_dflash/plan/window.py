"""The draft window: how far back the drafter reads, and the KV slots a request needs for it."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.drafter.formats import FULL


@dataclass(frozen=True)
class DraftWindow:
    """The span of context that the drafter reads.

    Attributes:
        tokens: context tokens before the block.
        block: positions of the widest block.
        page: slots of a KV page.
    """

    tokens: int
    block: int
    page: int

    def ring_slots(self, context: int) -> int:
        """KV slots of one request; ``context`` is the longest sequence, tokens."""
        return ring_slots(self.tokens, block=self.block, page=self.page, context=context)


def context_window(requested: int | None, drafter: DrafterConfig) -> int | None:
    """Context tokens that the drafter reads before the block; None for all of them.

    A sliding layer keeps the window it was trained with, ``sliding_window - 1`` tokens before its query. All layers
    share one slot table, so a shorter window than that would save no slot: full layers then read as far as the sliding
    ones.

    Args:
        requested: ``--speculative-draft-window-size``, tokens; None where it is not given.
    """
    if requested is None:
        return None
    sliding = 0 if drafter.sliding_window is None else drafter.sliding_window - 1
    return max(requested, sliding) if FULL in drafter.layer_types else sliding


def ring_slots(window: int, *, block: int, page: int, context: int) -> int:
    """KV slots of one request, in whole pages.

    Reading starts on a page boundary, up to ``page - 1`` tokens before the window, and ends with the block; a slot must
    not be written again while it can still be read.

    Args:
        window: context tokens that the drafter reads.
        block: positions of a draft block.
        page: slots of a KV page.
        context: the longest sequence, tokens. The block that ends a request may commit tokens beyond it, which the
            step after it reads if it was launched before the host saw that end; a longer window reads no more.
    """
    return -(-(min(window, context + block) + page - 1 + block) // page) * page
