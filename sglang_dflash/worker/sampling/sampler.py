"""The target's own token at every position of a block.

Plain decoding adjusts one row of logits per request and hands it to SGLang's sampler. Here a request has ``w`` rows,
one per block position, each adjusted and sampled as plain decoding would if the drafts before it had been accepted.
:func:`sglang_dflash.ops.reference.accept_block` says why that is exact.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.ops import Accepted
from sglang_dflash.upstream import Sampler
from sglang_dflash.worker.sampling.history import History
from sglang_dflash.worker.sampling.penalties import Penalties
from sglang_dflash.worker.sampling.seeded import SeededSampler, mark_seeded_rows


class TargetSampler:
    """Chooses the target's tokens, in prefill through SGLang and in a block here.

    Args:
        runner: the target's model runner; its sampler is replaced by :class:`SeededSampler`, unless the user brought
            one with ``--sampling-backend``.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        if type(runner.sampler) is Sampler:
            runner.sampler = SeededSampler()
        self._penalties = Penalties()
        self._history = History()

    def before_prefill(self, batch: Any) -> None:
        """Before the target's prefill, which samples each prompt's first token."""
        self._penalties.start(batch)
        self._history.start(batch)
        info = batch.sampling_info
        if info.has_custom_logit_processor and batch.decoding_reqs:
            # A mixed batch samples the next token of requests whose last block the host may not have seen yet.
            batch.sampling_info = dataclasses.replace(info, custom_params=self._history.params(batch))
        mark_seeded_rows(batch.sampling_info, batch.reqs)

    def after_prefill(self, batch: Any, next_token_ids: Tensor) -> None:
        """After it: ``next_token_ids`` int64 [bs] are generated tokens like any other."""
        self._generated(batch, next_token_ids[:, None], torch.ones_like(next_token_ids))

    def before_verify(self, batch: Any, draft_tokens: Tensor) -> None:
        """Before the target's forward over the block int64 [bs, w]: start what is needed on the host behind it."""
        self._history.expect(batch, draft_tokens)

    def choose(
        self, batch: Any, logits_output: Any, draft_tokens: Tensor, positions: Tensor, grammar_mask: Any = None
    ) -> Tensor:
        """The target's token after each block position, int64 [bs, w].

        Args:
            batch: the batch being verified.
            logits_output: its ``next_token_logits`` float32 [bs * w, V] are adjusted in place and used up; the
                log-probabilities that the batch asks for are added to it.
            draft_tokens: int64 [bs, w], column 0 the anchor.
            positions: int64 [bs * w].
            grammar_mask: allowed tokens of each of the bs * w rows, or None.
        """
        bs, width = draft_tokens.shape
        info, rows = batch.sampling_info, logits_output.next_token_logits
        logits = rows.view(bs, width, -1)
        # The order of plain decoding: penalties, grammar, bias, then (in the sampler) custom processors.
        self._penalties.apply(batch, logits, draft_tokens, positions.view(bs, width))
        if grammar_mask is not None:
            grammar_mask.apply(rows)
        if info.logit_bias is not None:
            logits.add_(info.logit_bias[:, None])

        wants = [batch.top_logprobs_nums, batch.token_ids_logprobs] if batch.return_logprob else [[], []]
        top_logprobs_nums, token_ids_logprobs = ([x for x in want for _ in range(width)] for want in wants)
        block_info = for_block(info, width)
        mark_seeded_rows(block_info, batch.reqs, width)
        if info.has_custom_logit_processor:
            block_info.custom_params = self._history.params(batch, width)
        tokens = self._runner.sampler(
            logits_output,
            block_info,
            batch.return_logprob,
            top_logprobs_nums,
            token_ids_logprobs,
            positions,
        )
        if batch.return_logprob:
            logits_output.next_token_logprobs = logits_output.next_token_logprobs.view(bs, width)
        return tokens.view(bs, width).long()

    def commit(self, batch: Any, accepted: Accepted) -> None:
        """After acceptance: the accepted tokens are generated."""
        self._generated(batch, accepted.out_tokens, accepted.accept_lens)

    def _generated(self, batch: Any, tokens: Tensor, lens: Tensor) -> None:
        self._penalties.count(batch, tokens, lens)
        self._history.add(batch, tokens, lens)


def for_block(info: Any, width: int) -> Any:
    """The sampling parameters of bs requests, repeated for the bs * width rows of a block, ``custom_params`` aside."""
    if info.is_all_greedy and not info.has_custom_logit_processor:
        return info  # the sampler takes the argmax and reads nothing per row
    repeat = partial(torch.repeat_interleave, repeats=width, dim=0)
    rows: dict[str, Any] = {
        name: repeat(value)
        for name in ("temperatures", "top_ps", "top_ks", "min_ps", "sampling_seed")
        if (value := getattr(info, name)) is not None
    }
    if info.has_custom_logit_processor:
        offsets = torch.arange(width, device=info.temperatures.device)
        rows["custom_logit_processor"] = {
            key: dataclasses.replace(
                entry,
                rows=[row * width + j for row in entry.rows for j in range(width)],
                indices=(entry.indices[:, None] * width + offsets).flatten(),
            )
            for key, entry in info.custom_logit_processor.items()
        }
    return dataclasses.replace(info, **rows)
