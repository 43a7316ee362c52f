"""Penalties that count every generated token. With overlap SGLang's penalties lag one block behind."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.utils.common import async_h2d
from torch import Tensor

from sglang_dflash.features.feature import Feature, fresh_rows
from sglang_dflash.ops import penalize_block

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_dflash.step.step import Step

_NEUTRAL = (0.0, 0.0, 1.0)


class Penalties(Feature):
    """Penalties and ``min_new_tokens`` of the running requests.

    Memory: 4 bytes x request slots x vocabulary, allocated when the first request with a penalty arrives.
    """

    def __init__(self) -> None:
        # generated tokens, int32 [slots, V], and coefficients, float32 [slots, 3]
        self._slots: tuple[Tensor, Tensor] | None = None

    def start(self, batch: ScheduleBatch) -> None:
        """Start a prefill's requests, and replace SGLang's penalties, which omit a retracted request's tokens."""
        if self._slots is None and any(_coefficients(req) != _NEUTRAL for req in batch.reqs):
            slots, device = batch.req_to_token_pool.req_to_token.shape[0], batch.device
            counts = torch.zeros((slots, batch.sampling_info.vocab_size), dtype=torch.int32, device=device)
            neutral = async_h2d([_NEUTRAL], dtype=torch.float32, device=device)
            self._slots = counts, neutral.repeat(slots, 1)
        if self._slots is not None:
            _start_rows(batch, *self._slots)
        if batch.sampling_info.acc_additive_penalties is not None:
            self._replace_prefill_penalties(batch)

    def apply(self, batch: ScheduleBatch, logits: Tensor, draft_tokens: Tensor, positions: Tensor) -> None:
        """Penalise a block's float32 ``logits`` [bs, w, V] in place; tokens and positions are int64 [bs, w]."""
        if self._slots is not None:
            counts, coefficients = self._slots
            penalize_block(logits, draft_tokens, counts, batch.req_pool_indices, coefficients)
        ban_early_stops(batch.reqs, logits, positions)

    def begin(self, batch: ScheduleBatch, tokens: Tensor) -> None:
        self._count(batch, tokens[:, None], torch.ones_like(tokens))

    def commit(self, step: Step) -> None:
        self._count(step.batch, step.accepted.out_tokens, step.accepted.accept_lens)

    def _count(self, batch: ScheduleBatch, tokens: Tensor, lens: Tensor) -> None:
        if self._slots is None or batch.sampling_info.acc_additive_penalties is None:
            return
        counts, _ = self._slots
        new = (torch.arange(tokens.shape[1], device=tokens.device) < lens[:, None]).int()
        entries = batch.req_pool_indices.long()[:, None] * counts.shape[1] + tokens
        counts.view(-1).scatter_add_(0, entries.flatten(), new.flatten())

    def _replace_prefill_penalties(self, batch: ScheduleBatch) -> None:
        info = batch.sampling_info
        additive = torch.zeros_like(info.acc_additive_penalties)
        if self._slots is not None:
            counts, coefficients = (each[batch.req_pool_indices.long()] for each in self._slots)
            frequency, presence, repetition = coefficients[:, None].unbind(-1)
            additive -= frequency * counts + presence * (counts > 0)
            if info.acc_scaling_penalties is not None:
                info.acc_scaling_penalties = torch.where(counts > 0, repetition, 1.0)
        ban_early_stops(batch.reqs, additive[:, None], batch.seq_lens[:, None] - 1)
        info.acc_additive_penalties = additive


def _start_rows(batch: ScheduleBatch, counts: Tensor, coefficients: Tensor) -> None:
    # another request may have used the slot
    fresh = fresh_rows(batch)
    copy = partial(async_h2d, device=counts.device)
    slots = batch.req_pool_indices.long()[copy(fresh, dtype=torch.int64)]
    coefficients[slots] = copy([_coefficients(batch.reqs[i]) for i in fresh], dtype=torch.float32).view(-1, 3)
    counts[slots] = 0
    generated = [(i, token) for i, index in enumerate(fresh) for token in batch.reqs[index].output_ids]
    if generated:
        row, token = copy(generated, dtype=torch.int64).unbind(1)
        counts.index_put_((slots[row], token), torch.ones_like(token, dtype=torch.int32), accumulate=True)


def ban_early_stops(reqs: list[Req], logits: Tensor, positions: Tensor) -> None:
    """Ban the tokens that end a request until it has ``min_new_tokens``, in place.

    Entry [b, j] of float32 ``logits`` [bs, w, V] chooses the token at ``positions[b, j] + 1``.
    """
    table = []  # per request: the first position whose token may end it, and the tokens that end it
    for req in reqs:
        params, stops, free_from = req.sampling_params, [0], 0
        # the host count may lag one step; the positions are exact
        if len(req.output_ids) < params.min_new_tokens and (found := _stop_tokens(req)):
            stops, free_from = sorted(found), len(req.origin_input_ids) + params.min_new_tokens
        table.append([free_from, *stops])
    if not any(free_from for free_from, *_ in table):
        return
    columns = max(map(len, table))  # one copy to the device: short lists repeat a token
    table = [row + row[-1:] * (columns - len(row)) for row in table]
    packed = async_h2d(table, dtype=torch.int64, device=logits.device)
    banned = positions + 1 < packed[:, :1]
    tokens = packed[:, None, 1:].expand(*positions.shape, columns - 1)
    logits.scatter_(2, tokens, logits.gather(2, tokens).masked_fill(banned[..., None], -torch.inf))


def _coefficients(req: Req) -> tuple[float, float, float]:
    params = req.sampling_params
    return params.frequency_penalty, params.presence_penalty, params.repetition_penalty


def _stop_tokens(req: Req) -> set[int]:
    ids = set(req.sampling_params.stop_token_ids or ()) | set(req.eos_token_ids or ())
    ids |= set(req.tokenizer.additional_stop_token_ids or ()) | {req.tokenizer.eos_token_id}
    return {token for token in ids if token is not None}
