"""Copied blocks: text that repeats an earlier part of its request is drafted by copying it.

A copy replaces the drafts from their first difference on, if the drafter's margin there is below :data:`MARGIN`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from sglang.srt.utils.common import async_h2d_stack
from torch import Tensor

from sglang_dflash.features.feature import Feature, fresh_rows, host_copy
from sglang_dflash.features.figures import COPIED_BLOCKS, COPIED_TOKENS, Figures
from sglang_dflash.launch.division import history_columns
from sglang_dflash.ops import match_copies, take_copies
from sglang_dflash.width.policy import BUCKET

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.step.flight import Finished
    from sglang_dflash.step.step import Step

MIN_MATCH = 4  # shortest match that is copied
MAX_MATCH = 16  # matches count up to this length
MARGIN = 4.0  # a draft with this logit lead replaces the copy (docs/measured.md#thresholds)


class Copies(Feature):
    """Token histories of all requests, by row of the target's ``ReqToTokenPool``.

    Column ``p`` of int32 ``history`` [rows, columns] holds the token at position ``p``; int64 ``found`` [rows, 2] the
    newest match and where the copy begins, as in ``ops.reference.step``.
    """

    def __init__(self, target: ModelRunner, width: int, figures: Figures) -> None:
        self._figures = figures
        pool, config = target.req_to_token_pool, target.model_config
        rows, device = pool.req_to_token.shape[0], pool.req_to_token.device
        columns = history_columns(config.context_len, target.max_total_num_tokens, width)
        self.history = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self.found = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._vocabulary, self._width = config.vocab_size, width
        self._matches: WeakKeyDictionary[Req, int] = WeakKeyDictionary()

    def start(self, batch: ScheduleBatch) -> None:
        rows = batch.req_pool_indices_cpu.tolist()
        for i in fresh_rows(batch):
            self._write(rows[i], batch.reqs[i].get_fill_ids())

    def begin(self, batch: ScheduleBatch, tokens: Tensor) -> None:
        lens = [prefix + extend for prefix, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        self._append_first(batch, tokens, lens)

    def transferred(self, batch: ScheduleBatch) -> None:
        rows, lens = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
        for row, req, length in zip(rows, batch.reqs, lens, strict=True):
            self._write(row, [*req.origin_input_ids, *req.output_ids][:length])
        self._append_first(batch, batch.spec_info.bonus_tokens, lens)

    def after_draft(self, step: Step) -> None:
        if step.width == 1:
            return
        assert step.margins is not None, "the drafter returned no margins"
        rows, last = step.batch.req_pool_indices, step.batch.seq_lens
        take_copies(step.tokens, step.margins, self.history, self.found, rows, last, least=MIN_MATCH, margin=MARGIN)

    def commit(self, step: Step) -> None:
        batch, accepted = step.batch, step.accepted
        self._append(batch, batch.seq_lens, accepted.out_tokens, accepted.new_seq_lens, step.state.committed_cpu)

    def collect(self, step: Step) -> tuple[list[int], Tensor]:
        return step.batch.req_pool_indices_cpu.numpy().tolist(), host_copy(self.found)

    def read(self, finished: Finished, collected: tuple[list[int], Tensor]) -> None:
        (rows, found), lengths, copied = collected, list[int](), 0
        keys, places = found.T.tolist()
        for req, row, accepted in zip(finished.requests, rows, finished.accept_lens, strict=True):
            if finished.width > 1 and places[row]:
                if (known := self._matches.get(req, 0)) >= MIN_MATCH:  # 0 after a prefill, whose match is not read
                    lengths.append(known)
                copied += max(0, accepted - places[row])
            self._matches[req] = (keys[row] >> 31) & 31
        self._figures.count(COPIED_BLOCKS, lengths)
        self._figures.add(COPIED_TOKENS, copied)

    def buckets(self, reqs: Sequence[Req]) -> Sequence[int]:
        return [self._matches.get(req, 0) // BUCKET for req in reqs]

    def _append_first(self, batch: ScheduleBatch, next_token_ids: Tensor, lens: list[int]) -> None:
        self.found.index_fill_(0, batch.req_pool_indices, 0)  # a longer request may have used the row
        self._append(batch, batch.seq_lens - 1, next_token_ids[:, None], batch.seq_lens, lens)

    def _append(self, batch: ScheduleBatch, after: Tensor, tokens: Tensor, newest: Tensor, lens: list[int]) -> None:
        # Append int64 [bs, w] ``tokens`` after position ``after``, and match the text that ends at ``newest``. ``lens``
        # on the host lags one step behind ``newest``.
        rows, bound = batch.req_pool_indices, max(lens) + 2 * self._width
        match_copies(self.history, self.found, rows, after, tokens, newest, longest=MAX_MATCH, bound=bound)

    def _write(self, row: int, ids: Sequence[int]) -> None:
        tokens = np.array(ids, dtype=np.int64)  # a copy: streaming sessions change ``ids`` in place
        # image placeholders are hashes of up to 62 bits
        known = (tokens >= 0) & (tokens < self._vocabulary)
        host = torch.from_numpy(np.where(known, tokens, -1).astype(np.int32))
        self.history[row, : len(ids)] = async_h2d_stack([host], device=self.history.device)[0]
