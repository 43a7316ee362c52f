"""Penalties that count every generated token, those of the running step included.

SGLang's penalizers learn of tokens on the host: under overlap a whole block late. Here the counts live on the device,
one row per request slot, and each step adds what it accepts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import penalize_block
from sglang_dflash.upstream import async_h2d

_NEUTRAL = (0.0, 0.0, 1.0)


class Penalties:
    """Frequency, presence and repetition penalties and ``min_new_tokens`` of the running requests.

    Memory: 4 bytes x slots x vocabulary, taken when the first request with a penalty arrives.

    Args:
        slots: rows of the request table.
        device: where the logits are.
    """

    def __init__(self, slots: int, device: torch.device | str) -> None:
        self._slots, self._device = slots, device
        self._counts: Tensor | None = None  # int32 [slots, V]
        self._coefficients = torch.tensor(_NEUTRAL, device=device).repeat(slots, 1)

    def start(self, batch: Any) -> None:
        """Before a prefill: take up its new requests and correct what SGLang will apply to their first token.

        A retracted request comes back with tokens generated; SGLang's penalizers have forgotten them by then.
        """
        info = batch.sampling_info
        if self._counts is None and not any(_coefficients(req) != _NEUTRAL for req in batch.reqs):
            if info.acc_additive_penalties is not None and any(req.output_ids for req in batch.reqs):
                self._replace_prefill_penalties(batch)
            return
        if self._counts is None:
            shape = (self._slots, info.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        decoding = {id(req) for req in batch.decoding_reqs or ()}  # rode along: counted already
        fresh = [i for i, req in enumerate(batch.reqs) if id(req) not in decoding]
        if fresh:
            self._take_up(batch, fresh)
        if info.acc_additive_penalties is not None:
            self._replace_prefill_penalties(batch)

    def apply(self, batch: Any, logits: Tensor, draft_tokens: Tensor, positions: Tensor) -> None:
        """Penalise a block's logits in place.

        Args:
            logits: float32 [bs, w, V].
            draft_tokens: int64 [bs, w], column 0 the anchor.
            positions: int64 [bs, w], absolute positions of the block's tokens.
        """
        if batch.sampling_info.acc_additive_penalties is None:  # SGLang's host-side flag: nobody asks for any
            return
        if self._counts is not None:
            penalize_block(logits, draft_tokens, self._counts, batch.req_pool_indices, self._coefficients)
        ban_early_stops(batch.reqs, logits, positions)

    def count(self, batch: Any, tokens: Tensor, lens: Tensor | None = None) -> None:
        """Add each request's first ``lens`` (default: all) of ``tokens`` int64 [bs, w] to its counts."""
        if self._counts is None or batch.sampling_info.acc_additive_penalties is None:
            return
        new = torch.ones_like(tokens, dtype=torch.int32)
        if lens is not None:
            new = (torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]).int()
        entries = batch.req_pool_indices.long()[:, None] * self._counts.shape[1] + tokens
        self._counts.view(-1).scatter_add_(0, entries.flatten(), new.flatten())

    def _take_up(self, batch: Any, rows: list[int]) -> None:
        assert self._counts is not None
        reqs = [batch.reqs[i] for i in rows]
        slots = batch.req_pool_indices.long()[async_h2d(rows, dtype=torch.int64, device=self._device)]
        self._coefficients[slots] = async_h2d(
            [_coefficients(req) for req in reqs], dtype=torch.float32, device=self._device
        )
        self._counts[slots] = 0
        generated = [(i, token) for i, req in enumerate(reqs) for token in req.output_ids]
        if generated:
            row, token = async_h2d(generated, dtype=torch.int64, device=self._device).unbind(1)
            one = torch.ones((), dtype=torch.int32, device=self._device)
            self._counts.index_put_((slots[row], token), one, accumulate=True)

    def _replace_prefill_penalties(self, batch: Any) -> None:
        """SGLang adds one matrix to the logits of a prefill and scales by another: fill both from our counts."""
        info = batch.sampling_info
        additive = torch.zeros_like(info.acc_additive_penalties)
        if self._counts is not None:
            counts = self._counts[batch.req_pool_indices.long()]
            frequency, presence, repetition = self._coefficients[batch.req_pool_indices.long()][:, None].unbind(-1)
            additive -= frequency * counts + presence * (counts > 0)
            if info.acc_scaling_penalties is not None:
                info.acc_scaling_penalties = torch.where(counts > 0, repetition, 1.0)
        ban_early_stops(batch.reqs, additive[:, None], batch.seq_lens[:, None] - 1)
        info.acc_additive_penalties = additive


def ban_early_stops(reqs: list[Any], logits: Tensor, positions: Tensor) -> None:
    """Rule out the tokens that end a request until it has ``min_new_tokens``, in place.

    Args:
        reqs: bs requests. A request's n-th new token (from 0) has position ``prompt length + n``.
        logits: float32 [bs, w, V]; entry [b, j] chooses the token at position ``positions[b, j] + 1``.
        positions: int64 [bs, w].
    """
    # The host's count of output tokens may lag, so this keeps a ban a step too long in the list, never too short.
    waiting = [len(req.output_ids) < req.sampling_params.min_new_tokens for req in reqs]
    if not any(waiting):
        return
    stops = [sorted(_stop_tokens(req)) if wait else [] for req, wait in zip(reqs, waiting, strict=True)]
    most = max(1, *map(len, stops))
    free_from = [
        len(req.origin_input_ids) + req.sampling_params.min_new_tokens if ids else 0
        for req, ids in zip(reqs, stops, strict=True)
    ]
    # One copy to the device; short lists repeat a token, a request without a ban has position 0 free.
    table = [
        [free, *ids, *[ids[0] if ids else 0] * (most - len(ids))] for free, ids in zip(free_from, stops, strict=True)
    ]
    packed = async_h2d(table, dtype=torch.int64, device=logits.device)
    banned = positions + 1 < packed[:, :1]
    tokens = packed[:, None, 1:].expand(*positions.shape, most)
    logits.scatter_(2, tokens, logits.gather(2, tokens).masked_fill(banned[..., None], -torch.inf))


def _coefficients(req: Any) -> tuple[float, float, float]:
    params = req.sampling_params
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _stop_tokens(req: Any) -> set[int]:
    """Every token id that ends this request: its own, the model's and the tokenizer's."""
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return {token for token in ids if token is not None}
