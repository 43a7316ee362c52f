"""SGLang's sampler, extended to honour the seed of each request."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_dflash.ops import seeded_tokens
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

    _asked: tuple[SeededRows, Tensor] | None = None  # rows to draw, positions
    _drawn: Tensor

    def forward(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
        **others: Any,
    ) -> Tensor:
        seeded: SeededRows | None = getattr(sampling_info, "seeded_rows", None)
        self._asked = None if seeded is None else (seeded, positions)
        reads_probs = return_logprob or sampling_info.sampling_mask_batch_indices is not None
        if seeded is None or seeded.rows is not None or reads_probs:
            asked = top_logprobs_nums, token_ids_logprobs, positions
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *asked, **others)
            return tokens
        self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        self._sync_token_ids_across_tp(self._drawn, sampling_info)
        return self._drawn

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        """Draw the seeded rows as soon as the logits are adjusted: SGLang then overwrites them with probabilities."""
        logits = super()._preprocess_logits(logits, sampling_info)
        if self._asked is not None:
            (seeded, positions), self._asked, info = self._asked, None, sampling_info
            filtered = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
            filters = (info.top_ks, info.top_ps, info.min_ps) if filtered else None
            self._drawn = seeded_tokens(logits, info.temperatures, filters, seeded.seeds, positions, seeded.rows)
        return logits

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        seeded: SeededRows | None = getattr(sampling_info, "seeded_rows", None)
        if seeded is not None and seeded.rows is None and sampling_info.sampling_mask_batch_indices is None:
            return self._drawn, None
        # Let SGLang draw all rows, which is cheaper than copying the unseeded ones, and replace the seeded rows.
        tokens, mask = super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        if seeded is not None:
            tokens = self._drawn if seeded.rows is None else tokens.long().index_copy_(0, seeded.rows, self._drawn)
        return tokens, mask
