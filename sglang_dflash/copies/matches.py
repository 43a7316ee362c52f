"""What the host hears of matches and copies, one step late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from torch import Tensor

if TYPE_CHECKING:
    from sglang_dflash.upstream import Req

LEAST = 4
"""Shortest match that is copied."""
LONGEST = 16
"""Tokens of a match that are counted; a longer one is as good."""


class Matches:
    """Length of each request's latest match that the host knows of."""

    def __init__(self) -> None:
        self._lengths: WeakKeyDictionary[Req, int] = WeakKeyDictionary()

    def long_enough(self, reqs: Sequence[Req]) -> list[bool]:
        """Whether each request's match can be copied."""
        return [self._lengths.get(req, 0) >= LEAST for req in reqs]

    def replace(self, req: Req, length: int) -> int:
        """Note a request's new match; returns the length of the one before."""
        before = self._lengths.get(req, 0)
        self._lengths[req] = length
        return before


class Copied:
    """What a step's blocks copied, on its way to the host.

    Args:
        matches: learns of the matches.
        reqs: bs requests.
        found: int64 [bs, 2], see :func:`sglang_dflash.ops.reference.find_copies`; on the host once the step's accept
            lengths are.
        drafted: whether the step had drafts that a copy could replace.

    Attributes:
        lengths: of the matches that were copied.
        tokens: that copies brought and the drafts in their place would not have.
    """

    def __init__(self, matches: Matches, reqs: Sequence[Req], found: Tensor, *, drafted: bool) -> None:
        self._matches, self._reqs, self._found, self._drafted = matches, tuple(reqs), found, drafted
        self.lengths: list[int] = []
        self.tokens = 0

    def arrived(self, accept_lens: Sequence[int]) -> None:
        """The step's results are on the host."""
        for req, accepted, (key, first) in zip(self._reqs, accept_lens, self._found.tolist(), strict=True):
            length = self._matches.replace(req, key >> 32)
            if self._drafted and first:
                self.lengths.append(length)
                # Where the two differ at most one is right: what was accepted from there on is the copy's alone.
                self.tokens += max(0, accepted - first)
        self._reqs = ()
