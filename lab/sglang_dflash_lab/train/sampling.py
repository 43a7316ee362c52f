"""Seeded draws of a target's tokens, and of drafts with the same noise, in numpy: sampling of the reference decoder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

UNSURE = 0.4
CANDIDATES = 16
_Numbers = NDArray[np.float64]
_Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """A request's sampling parameters, with their names in SGLang; ``unsure`` of 0 drafts the best tokens.

    ``by_rank``: noise belongs to a token's rank, as under ``top_p`` in SGLang's deterministic mode.
    """

    sampling_seed: int
    temperature: float
    top_p: float = 1.0
    unsure: float = UNSURE
    by_rank: bool = False

    def draw(self, scores: _Numbers, tokens: _Ids, position: int) -> int:
        """Return the index of the drawn score, all [n]; ``position`` is that of the token before."""
        weights = self.weights(scores)
        if self.by_rank:
            tokens = np.argsort(-weights, kind="stable").argsort()
        uniform = (_murmur(self.sampling_seed, position, tokens) + 0.5) / 2**32
        with np.errstate(divide="ignore"):
            return int((-np.log(uniform) / weights).argmin())

    def weights(self, scores: _Numbers) -> _Numbers:
        """Return what the target's tokens are drawn in proportion to, [n]; their sum is at most 1."""
        weights = _softmax(scores / self.temperature)
        order = np.argsort(-weights, kind="stable")
        above = np.cumsum(weights[order]) - weights[order]
        if self.top_p < 1:
            weights[order[above > self.top_p]] = 0.0
        return weights

    def draft(self, scores: _Numbers, tokens: _Ids, position: int) -> int:
        """Return the index of the best score, or of the drawn one where the best is not sure."""
        best = int(scores.argmax())
        return best if _softmax(scores)[best] >= self.unsure else self.draw(scores, tokens, position)


class Rejection(Sampling):
    """Speculative sampling (Leviathan et al., 2023, algorithm 1): drafts are drawn too, and accepted by p / q.

    SGLang's worker serves DFlash2 so (``sample_path``, ``accept_sampling``). q is at the request's temperature over the
    selector's candidates, without top_p. The text has the target's law, but is not the seed's.
    """

    @cached_property
    def _random(self) -> np.random.Generator:
        return np.random.default_rng(self.sampling_seed)

    @cached_property
    def _drafted(self) -> dict[int, tuple[_Ids, _Numbers, int]]:
        return {}  # position -> candidates, q, index of the draft

    def draft(self, scores: _Numbers, tokens: _Ids, position: int) -> int:
        q = _softmax(scores / self.temperature)
        drawn = int(self._random.choice(len(q), p=q))
        self._drafted[position] = tokens, q, drawn
        return drawn

    def draw(self, scores: _Numbers, tokens: _Ids, position: int) -> int:
        """Return the draft at ``position`` if it is accepted; ``tokens`` is the whole vocabulary."""
        p = self.weights(scores)
        p /= p.sum()
        if position in self._drafted:
            candidates, q, drawn = self._drafted.pop(position)
            draft = candidates[drawn]
            if self._random.random() * q[drawn] < p[draft]:
                return int(draft)
            p[candidates] = np.maximum(p[candidates] - q, 0)
        return int(self._random.choice(len(p), p=p / p.sum()))


def _softmax(scores: _Numbers) -> _Numbers:
    weights: _Numbers = np.exp(scores - scores.max())
    return weights / weights.sum()


def _murmur(seed: int, position: int, tokens: _Ids) -> _Numbers:
    """MurmurHash3 (x86, 32 bit, Appleby) of (seed, position, token), 16 bytes."""
    state = np.zeros(len(tokens), dtype=np.uint32)
    for word in (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, position, tokens):
        key = _rotated(np.asarray(word).astype(np.uint32) * np.full(1, 0xCC9E2D51, np.uint32), 15)
        state = _rotated(state ^ key * np.uint32(0x1B873593), 13) * np.uint32(5) + np.uint32(0xE6546B64)
    state = state ^ np.uint32(16)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        state = (state ^ state >> np.uint32(shift)) * np.uint32(factor)
    return (state ^ state >> np.uint32(16)).astype(np.float64)


def _rotated(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return words << np.uint32(bits) | words >> np.uint32(32 - bits)
