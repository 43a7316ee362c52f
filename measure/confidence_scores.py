"""Estimates of the chance that a draft is committed, how well they fit, and what a cut by them brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from measure.confidence_blocks import BLOCK, Blocks

Estimate = Callable[[Blocks], Tensor]
"""The chance of each draft to be committed, float64 [n, 15], never rising along a row."""

LEAST_CUT, MOST_CUT = 0.02, 0.9
DRAFT_SHARE = 0.1  # time of the drafter, of that of a verified block of the same width
_RIDGE = 1.0
_BINS = 10
_NEVER = 1e-6  # keeps logarithms finite


def product(blocks: Blocks) -> Tensor:
    """The product of the drafter's probabilities, which is what the worker cuts by."""
    return blocks.confidence[..., 0].double().cumprod(1)


def with_temperature(fit: Blocks) -> Estimate:
    """The product at the temperature of the drafter's logits that makes what happened in ``fit`` likeliest."""
    right = fit.right[fit.at_risk].float()
    losses = [
        F.binary_cross_entropy(p[fit.at_risk].clamp(_NEVER, 1 - _NEVER), right) for p in fit.confidence.unbind(-1)
    ]
    best = int(torch.stack(losses).argmin())
    return lambda blocks: blocks.confidence[..., best].double().cumprod(1)


def logistic(fit: Blocks) -> Estimate:
    """The product of sigmoid(slope * logit(p_j) + intercept_j), slope and intercepts by maximum likelihood.

    What is fitted is the hazard: whether a draft is right, given that all before it are. A ridge keeps positions that
    few blocks reach at the drafter's own word: slope 1, intercept 0.
    """
    at_risk = fit.at_risk
    feature, right = _logit(fit)[at_risk], fit.right[at_risk].double()
    place = torch.arange(BLOCK - 1).expand_as(at_risk)[at_risk]
    slope, intercepts = torch.ones((), dtype=torch.float64), torch.zeros(BLOCK - 1, dtype=torch.float64)
    parameters = [slope.requires_grad_(), intercepts.requires_grad_()]
    optimiser = torch.optim.LBFGS(parameters, max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        ridge = _RIDGE / 2 * ((slope - 1).square() + intercepts.square().sum())
        logits = slope * feature + intercepts[place]
        value = F.binary_cross_entropy_with_logits(logits, right, reduction="sum") + ridge
        value.backward()
        return value

    optimiser.step(loss)
    a, b = slope.detach(), intercepts.detach()
    return lambda blocks: torch.sigmoid(a * _logit(blocks) + b).cumprod(1)


def _logit(blocks: Blocks) -> Tensor:
    return blocks.confidence[..., 0].double().clamp(_NEVER, 1 - _NEVER).logit()


class Fit(NamedTuple):
    """How well an estimate fits, lower is better; over all known positions."""

    log_loss: float
    brier: float
    calibration_error: float  # mean distance of estimate and frequency, over bins of equal count


def fit_of(estimates: Tensor, blocks: Blocks) -> Fit:
    said, happened = estimates[blocks.known], blocks.survived[blocks.known].double()
    log_loss = F.binary_cross_entropy(said.clamp(_NEVER, 1 - _NEVER), happened)
    order = said.argsort()
    bins = zip(said[order].tensor_split(_BINS), happened[order].tensor_split(_BINS), strict=True)
    error = sum(abs(float((s - h).sum())) for s, h in bins) / len(said)
    return Fit(float(log_loss), float((said - happened).square().mean()), error)


class Walk(NamedTuple):
    """Of one text: tokens after the first, steps, and verified positions, anchors included."""

    tokens: int
    steps: int
    verified: int


def walk(accept_lens: Sequence[int], verify_lens: Sequence[int]) -> Walk:
    """Through one text, whose block at anchor s has ``accept_lens[s]`` if all of it is verified."""
    at = steps = verified = 0
    while at < len(accept_lens):
        steps, verified = steps + 1, verified + verify_lens[at]
        at += min(accept_lens[at], verify_lens[at])
    return Walk(len(accept_lens), steps, verified)


class Route(NamedTuple):
    """One way through all texts."""

    width: int
    walks: list[Walk]


@dataclass(frozen=True)
class Load:
    """A machine at some load: a step of v verified positions takes 1 + ``per_token`` (v - 1), drafting ``DRAFT_SHARE``
    of that at the drafted width; plain decoding, width 1, takes 1.
    """

    ratio: float  # time of verifying 16 positions over that of 1

    @property
    def per_token(self) -> float:
        return (self.ratio - 1) / (BLOCK - 1)

    def rate(self, route: Route) -> float:
        """Tokens per time."""
        tokens, steps, verified = (sum(column) for column in zip(*route.walks, strict=True))
        drafting = DRAFT_SHARE * (1 + self.per_token * (route.width - 1)) if route.width > 1 else 0.0
        return tokens / (steps * (1 - self.per_token + drafting) + self.per_token * verified)


class Cutter:
    """Ways through texts at one drafted width, cut by one estimate.

    Args:
        estimates: per text, [n, 15].
    """

    def __init__(self, texts: Sequence[Blocks], estimates: Sequence[Tensor], width: int) -> None:
        self._width = width
        self._accept = [(1 + text.survived[:, : width - 1].sum(1)).tolist() for text in texts]
        self._estimates = [estimate[:, : width - 1] for estimate in estimates]
        self._known: dict[float, Route] = {}

    def route(self, threshold: float) -> Route:
        """A position is verified while its estimate is at least the threshold."""
        if threshold not in self._known:
            lens = [(1 + (estimate >= threshold).sum(1)).tolist() for estimate in self._estimates]
            walks = [walk(*text) for text in zip(self._accept, lens, strict=True)]
            self._known[threshold] = Route(self._width, walks)
        return self._known[threshold]

    def by_rule(self, load: Load) -> Route:
        """The threshold is the rate times what one more position costs."""
        rate = 1.0
        for _ in range(8):
            route = self.route(min(max(rate * load.per_token, LEAST_CUT), MOST_CUT))
            rate = load.rate(route)
        return route

    def swept(self, load: Load) -> Route:
        """The best of many thresholds, chosen with hindsight."""
        return max(map(self.route, (0.0, *(2.0 ** (-i / 4) for i in range(1, 36)))), key=load.rate)
