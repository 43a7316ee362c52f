"""SGLang's sampler with seeded draws: the seed is the request's, or a random one.

The noise is a function of seed, position and token, and independent of batch, block width and drafter. Under
``--enable-deterministic-inference`` SGLang's seeds apply.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.sampler import Sampler, _SamplingMaskCapture
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dflash.features.feature import Feature, fresh_rows
from sglang_dflash.ops import Noise, seeded_tokens
from sglang_dflash.ops.reference.sampling import filter_probs

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool


class Seeds(Feature):
    """Seeds of the running requests; equal on all ranks of a group.

    ``noise`` holds the seeds and sampling parameters of a batch, in memory that the drafter's graphs read.
    """

    def __init__(self, pool: ReqToTokenPool, random_seed: int) -> None:
        self._slots = torch.zeros(len(pool.req_to_token), dtype=torch.int64, device=pool.device)
        self._random = random.Random(random_seed)
        ones = torch.ones_like(self._slots, dtype=torch.float32)
        self.noise = Noise(self._slots.clone(), ones, ones.int(), ones.clone(), torch.zeros_like(ones))
        self._shared: Tensor | None = None  # rows of the last sampled batch; SGLang replaces them with its requests

    def start(self, batch: ScheduleBatch) -> None:
        if _draws(batch.sampling_info):
            fresh = fresh_rows(batch)
            given = [batch.reqs[i].sampling_params.sampling_seed for i in fresh]
            seeds = [self._random.getrandbits(63) if seed is None else seed for seed in given]
            indices, values = async_h2d([fresh, seeds], dtype=torch.int64, device=self._slots.device)
            self._slots[batch.req_pool_indices.long()[indices]] = values
        self.attach(batch)

    def attach(self, batch: ScheduleBatch) -> None:
        """Set the seeds, int64 [bs], on ``sampling_info``: SGLang passes nothing else to :class:`SeededSampler`."""
        rows, info = batch.req_pool_indices, batch.sampling_info
        info.seeds = None
        if _draws(info):
            info.seeds = self.noise.seeds[: len(batch.reqs)] if rows is self._shared else self._slots[rows.long()]

    def publish_noise(self, batch: ScheduleBatch) -> None:
        """Write ``noise`` before the drafter reads it. Unchanged requests, and greedy after greedy ones, need no copy.

        In deterministic mode SGLang's sampler hashes ranks instead of tokens if a request of the batch has top_k or
        top_p. The drafter ranks tokens differently, so it drafts the best ones then.
        """
        shared, info = self._shared, batch.sampling_info
        self._shared = None if info.is_all_greedy else batch.req_pool_indices
        if self._shared is shared:
            return
        if not _draws(info) and (info.is_all_greedy or info.need_top_k_sampling or info.need_top_p_sampling):
            self.noise.top_ks.fill_(1)
            return
        seeds = self._slots[batch.req_pool_indices.long()] if _draws(info) else info.sampling_seed
        values = seeds, info.temperatures.view(-1), info.top_ks, info.top_ps, info.min_ps
        for memory, value in zip(self.noise, values, strict=True):
            memory[: len(value)].copy_(value)


def _draws(info: Any) -> bool:
    return not info.is_all_greedy and info.sampling_seed is None  # SGLang sets them in deterministic mode


class SeededSampler(Sampler):
    _positions: Tensor | None = None
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
        seeded = getattr(sampling_info, "seeds", None) is not None
        self._positions = positions if seeded else None
        if return_logprob or not seeded or sampling_info.sampling_mask_batch_indices is not None:
            requested = top_logprobs_nums, token_ids_logprobs, positions
            tokens: Tensor = super().forward(logits_output, sampling_info, return_logprob, *requested, **others)
            return tokens
        self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        self._sync_token_ids_across_tp(self._drawn, sampling_info)
        return self._drawn

    def _preprocess_logits(self, logits: Tensor, sampling_info: Any) -> Tensor:
        """Draw here, because SGLang then overwrites the logits with probabilities."""
        logits = super()._preprocess_logits(logits, sampling_info)
        if self._positions is not None:
            positions, self._positions, info = self._positions, None, sampling_info
            filtered = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
            filters = (info.top_ks, info.top_ps, info.min_ps) if filtered else None
            self._drawn = seeded_tokens(logits, info.temperatures, filters, info.seeds, positions)
        return logits

    def _sample_from_probs(
        self, probs: Tensor, sampling_info: Any, positions: Tensor, simple_sampling_case: bool
    ) -> tuple[Tensor, Any]:
        if getattr(sampling_info, "seeds", None) is not None:
            rows = sampling_info.sampling_mask_batch_indices
            return self._drawn, None if rows is None else self._support(probs[rows], sampling_info, rows)
        drawn: tuple[Tensor, Any] = super()._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)
        return drawn

    def _support(self, probs: Tensor, info: Any, rows: Tensor) -> _SamplingMaskCapture:
        """Capture the tokens that may be drawn in ``rows`` [n], with ``probs`` [n, V], for ``return_sampling_mask``."""
        top_ks, drawn = info.top_ks[rows], self._drawn[rows, None]
        weights = filter_probs(probs, top_ks, info.top_ps[rows], info.min_ps[rows])
        # rounding at a filter's edge, or equal logits of a greedy row, must not exclude the drawn token
        weights = weights.masked_fill((top_ks == 1)[:, None], 0).scatter(1, drawn, probs.gather(1, drawn))
        return _SamplingMaskCapture(weights, None, None, rows)
