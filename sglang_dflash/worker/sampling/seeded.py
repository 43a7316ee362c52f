"""SGLang's sampler with requests' seeds honoured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import argmax, filter_probs, seeded_draw
from sglang_dflash.upstream import Sampler


class SeededSampler(Sampler):
    """SGLang's sampler, with the seed of a request honoured in every mode, and a short way for greedy requests.

    Stock SGLang reads seeds only under ``--enable-deterministic-inference``; there this class changes nothing, so the
    output equals plain decoding's in that mode. Elsewhere the noise of a token is a function of (seed, position, token)
    alone: not of the batch, the block width or the drafter.
    """

    def forward(
        self, logits_output: Any, sampling_info: Any, return_logprob: bool, *others: Any, **options: Any
    ) -> Tensor:
        # A request that was refused for its sampling mask is still prefilled, and its answer wants one.
        wants_more = return_logprob or sampling_info.sampling_mask_batch_indices is not None
        if wants_more or not sampling_info.is_all_greedy:
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *others, **options)
            return tokens
        tokens = argmax(self._preprocess_logits(logits_output.next_token_logits, sampling_info))
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        if self.enable_deterministic or sampling_info.sampling_seed is None:
            return super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        if not simple_sampling_case:
            # 1.0 means no filter: rounding of the running sum must not cut the tail because others in the batch filter.
            top_ps = sampling_info.top_ps.masked_fill(sampling_info.top_ps >= 1, torch.inf)
            probs = filter_probs(probs, sampling_info.top_ks, top_ps, sampling_info.min_ps)
        return seeded_draw(probs, sampling_info.sampling_seed, positions), None
