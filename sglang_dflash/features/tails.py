"""Tails: the drafter's K/V before the end of a cached prefix. With them a draft window shortens no prefix hit.

A ring holds the last tokens of a running request. When SGLang's prefix tree takes a request's tokens, their last window
is copied to slots after the rings. A hit copies it into the ring of its request. A tail has the number of the tree node
that ends the prefix. SGLang uses no number twice, so no hit reads the tail of a removed node, and it is evicted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.launch.plan import DraftWindow, current
from sglang_dflash.upstream.hooks import Hooks

if TYPE_CHECKING:
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams, MatchResult

Slots = NDArray[np.int64]


@dataclass(frozen=True)
class Tail:
    """Slots of the visible tokens before ``end``, oldest first. The last ``new`` are unwritten."""

    end: int
    slots: Slots
    new: int

    def unwritten(self) -> tuple[Slots, Slots]:
        """Return positions and slots of the tokens to be written."""
        first = len(self.slots) - self.new
        return np.arange(self.end - self.new, self.end), self.slots[first:]


class Tails:
    """Tails by tree node, in ``slots`` slots from ``first`` on. Tails of one text share the slots of common tokens.

    The least recently used ones make room for a new one.
    """

    def __init__(self, first: int, slots: int, window: DraftWindow) -> None:
        self._first, self._size, self._window = first, slots, window
        self._by_node: OrderedDict[Any, Tail] = OrderedDict()
        self.evicted = 0
        self.clear()

    def clear(self) -> None:
        self._by_node.clear()
        self._free = list(range(self._first, self._first + self._size))
        self._uses = np.zeros(self._size, dtype=np.int32)  # tails that hold a slot

    def find(self, node: Any, end: int) -> Tail | None:
        """Return the tail of a prefix of ``end`` tokens, and mark it as used."""
        tail = self._by_node.get(node)
        if tail is None or tail.end != end:
            return None
        self._by_node.move_to_end(node)
        return tail

    def take(self, end: int, older: Tail | None) -> Tail | None:
        """Take slots for a tail. It shares slots with ``older``, a stored tail that ends earlier in this text."""
        start, shared = self._window.start(end), np.empty(0, dtype=np.int64)
        if older is not None and start < older.end <= end:
            shared = older.slots[start - older.end :]
        new = end - start - len(shared)
        self._uses[shared - self._first] += 1
        while len(self._free) < new and self._by_node:
            self.release(self._by_node.popitem(last=False)[1])
            self.evicted += 1
        at = len(self._free) - new
        if at < 0:
            self.release(Tail(end, shared, 0))
            return None
        tail = Tail(end, np.concatenate([shared, np.array(self._free[at:], dtype=np.int64)]), new)
        del self._free[at:]
        self._uses[tail.slots[len(shared) :] - self._first] = 1
        return tail

    def store(self, node: Any, tail: Tail) -> None:
        if old := self._by_node.pop(node, None):
            self.release(old)
        self._by_node[node] = tail

    def release(self, tail: Tail) -> None:
        self._uses[tail.slots - self._first] -= 1
        self._free += tail.slots[self._uses[tail.slots - self._first] == 0].tolist()

    def info(self) -> dict[str, Any]:
        held = self._size - len(self._free)
        return {"prefixes": len(self._by_node), "slots": held, "of": self._size, "evicted": self.evicted}


def match(original: Callable[..., MatchResult], cache: Any, params: MatchPrefixParams) -> MatchResult:
    """Hook around ``UnifiedRadixCache.match_prefix``: end a hit one window early if it has no tail.

    The prefill then contains the tokens that the next block reads.
    """
    rings = current.worker.rings
    if params.req is None or rings is None:
        return original(cache, params)
    longest = original(cache, replace(params, cow_mamba=False))
    tokens = longest.device_prefix_len + longest.host_hit_length
    most = max(0, len(params.key) + 1 - rings.window.tokens)
    # a streaming session's ring outlives the turn
    in_session = longest.cache_protected_len is not None
    if tokens > most and not in_session and rings.tails.find(longest.best_match_node, tokens) is None:
        params = replace(params, key=params.key[:most])
    elif not params.cow_mamba:
        return longest
    return original(cache, params)


def cache_tail(_: None, __: Any, req: Any, **___: Any) -> None:
    """Hook after ``UnifiedRadixCache.checkpoint_into_tree``: the tree holds ``req``'s tokens up to ``last_node``."""
    rings = current.worker.rings
    if rings is not None and req.kv.cache_protected_len:
        rings.store_tail(req)


_TREE = "mem_cache.unified_radix_cache.UnifiedRadixCache"
HOOKS = Hooks(around={f"{_TREE}.match_prefix": match}, after={f"{_TREE}.checkpoint_into_tree": cache_tail})
