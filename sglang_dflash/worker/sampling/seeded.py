"""SGLang's sampler, extended to honour the seed of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.ops import filter_probs, seeded_draw
from sglang_dflash.plan.pools import SAMPLED_AT_ONCE
from sglang_dflash.upstream import Sampler, async_h2d


class SeededRows(NamedTuple):
    """Rows of a batch whose requests have a seed, int64 [k], k > 0, and their seeds, int64 [k], dense."""

    rows: Tensor
    seeds: Tensor


def mark_seeded_rows(sampling_info: Any, reqs: list[Any], width: int = 1) -> None:
    """Mark the rows with a seed for :class:`SeededSampler`, on the only argument that SGLang passes to it.

    Each request has ``width`` consecutive rows. A copy of the info by ``dataclasses.replace`` loses the mark.
    """
    sampling_info.seeded_rows = None
    if sampling_info.is_all_greedy or sampling_info.sampling_seed is not None:  # SGLang's, in deterministic mode
        return
    seeds = [(row, seed) for row, req in enumerate(reqs) if (seed := req.sampling_params.sampling_seed) is not None]
    if not seeds:
        return
    device = sampling_info.temperatures.device
    rows, values = async_h2d(list(zip(*seeds, strict=True)), dtype=torch.int64, device=device)
    block = rows[:, None] * width + torch.arange(width, device=device)
    sampling_info.seeded_rows = SeededRows(block.flatten(), values.repeat_interleave(width))


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
        if len(drawn) == len(probs) and sampling_info.sampling_mask_batch_indices is None:
            return drawn, None  # mark_seeded_rows lists rows in order
        # Let SGLang draw all rows, which is cheaper than copying the unseeded ones, and replace the seeded rows.
        tokens, mask = super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        return tokens.long().index_copy_(0, seeded.rows, drawn), mask


def _draw(probs: Tensor, sampling_info: Any, positions: Tensor, seeded: SeededRows, simple: bool) -> Tensor:
    # Int64 [k]. Some rows at a time, because each filter copies its input.
    all_rows = len(seeded.rows) == len(probs)  # in order, as mark_seeded_rows lists them
    filters = (sampling_info.top_ks, sampling_info.top_ps, sampling_info.min_ps)
    drawn = []
    for start in range(0, len(seeded.rows), most := max(1, SAMPLED_AT_ONCE // probs.shape[1])):
        part = slice(start, start + most)
        rows = seeded.rows[part]
        weights = probs[part] if all_rows else probs.index_select(0, rows)
        if not simple:
            top_ks, top_ps, min_ps = (values.index_select(0, rows) for values in filters)
            # 1.0 means no filter: the rounding of a sum must not cut the tail when other requests of the batch filter.
            weights = filter_probs(weights, top_ks, top_ps.masked_fill(top_ps >= 1, torch.inf), min_ps)
        drawn.append(seeded_draw(weights, seeded.seeds[part], positions.index_select(0, rows)))
    return torch.cat(drawn)
