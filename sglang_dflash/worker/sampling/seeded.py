"""SGLang's sampler, extended to honour the seed of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.ops import filter_probs, seeded_draw
from sglang_dflash.plan.pools import SAMPLED_AT_ONCE
from sglang_dflash.upstream import Sampler, async_h2d


class SeededRows(NamedTuple):
    """Rows of a batch whose requests have a seed, int64 [k], k > 0, None for all; and their seeds, int64 [k], dense."""

    rows: Tensor | None
    seeds: Tensor

    def for_block(self, width: int) -> SeededRows:
        """Return the ``width`` consecutive rows of each request in a block; ``rows`` is not None."""
        assert self.rows is not None
        block = self.rows[:, None] * width + torch.arange(width, device=self.rows.device)
        return SeededRows(block.flatten(), self.seeds.repeat_interleave(width))


def mark_seeded_rows(sampling_info: Any, reqs: list[Any]) -> None:
    """Mark the rows with a seed for :class:`SeededSampler`, on the only argument that SGLang passes to it.

    A copy of the info by ``dataclasses.replace`` loses the mark.
    """
    sampling_info.seeded_rows = None
    if sampling_info.is_all_greedy or sampling_info.sampling_seed is not None:  # SGLang's, in deterministic mode
        return
    seeds = [(row, seed) for row, req in enumerate(reqs) if (seed := req.sampling_params.sampling_seed) is not None]
    if not seeds:
        return
    device = sampling_info.temperatures.device
    rows, values = async_h2d(list(zip(*seeds, strict=True)), dtype=torch.int64, device=device)
    sampling_info.seeded_rows = SeededRows(None if len(seeds) == len(reqs) else rows, values)


class SeededSampler(Sampler):
    """SGLang's sampler, with seeds honoured in every mode.

    Stock SGLang reads seeds only under ``--enable-deterministic-inference``; then no row is marked, so the output
    equals plain decoding's. Otherwise a token's noise is a function of seed, position and token, independent of batch,
    block width and drafter.
    """

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        seeded: SeededRows | None = getattr(sampling_info, "seeded_rows", None)
        if seeded is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        drawn = _draw(probs, sampling_info, positions, seeded, simple_sampling_case)
        if seeded.rows is None and sampling_info.sampling_mask_batch_indices is None:
            return drawn, None
        # Let SGLang draw all rows, which is cheaper than copying the unseeded ones, and replace the seeded rows.
        tokens, mask = super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        return drawn if seeded.rows is None else tokens.long().index_copy_(0, seeded.rows, drawn), mask


def _draw(probs: Tensor, sampling_info: Any, positions: Tensor, seeded: SeededRows, simple: bool) -> Tensor:
    # Int64 [k]. Some rows at a time, because each filter copies its input.
    filters = (sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
    drawn = []
    for start in range(0, len(seeded.seeds), most := max(1, SAMPLED_AT_ONCE // probs.shape[1])):
        part = slice(start, start + most)
        rows = part if seeded.rows is None else seeded.rows[part]
        weights = probs[rows]
        if not simple:
            weights = filter_probs(weights, *(values[rows] for values in filters))
        drawn.append(seeded_draw(weights, seeded.seeds[part], positions[rows]))
    return torch.cat(drawn) if len(drawn) > 1 else drawn[0]
