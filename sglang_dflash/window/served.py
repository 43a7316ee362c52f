"""The draft window of the server that this process runs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from sglang_dflash.drafter.served import drafter_config, our_worker_serves
from sglang_dflash.upstream import get_schedule, get_spec
from sglang_dflash.window.size import context_window, ring_slots


@dataclass(frozen=True)
class DraftWindow:
    """How far back the drafter reads.

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


def served_window() -> DraftWindow | None:
    """None if the drafter reads the whole context, or if our worker does not serve in this process."""
    if not our_worker_serves():
        return None
    return _window()


@cache
def _window() -> DraftWindow | None:
    spec = get_spec()
    tokens = context_window(spec.speculative_draft_window_size, drafter_config())
    if tokens is None:
        return None
    return DraftWindow(tokens, block=spec.speculative_num_draft_tokens, page=get_schedule().page_size)
