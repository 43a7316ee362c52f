"""Copied blocks: text that repeats earlier parts of the same request is drafted by copying it.

The device keeps each request's tokens, finds the longest earlier occurrence of the newest ones and copies what followed
it. The host receives matches and copies one step late.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from sglang_dflash.ops import match_copies, offer_copies
from sglang_dflash.plan.division import history_columns
from sglang_dflash.upstream.worker import async_d2h

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ModelRunner, Req, ScheduleBatch
    from sglang_dflash.worker.step import Step

LEAST = 4  # shortest match that is copied
LONGEST = 16  # longest match that is distinguished
UNSURE = 4.0  # a copy replaces a draft whose logit leads the second by less


class Copies:
    """Token histories of all requests, by row of the target's ``ReqToTokenPool``.

    Column ``p`` of int32 ``history`` [rows, columns] holds the request's token at position ``p``, up to the anchor at
    its committed length. Later columns are stale and never read. No operation waits. ``width`` is the server's block
    size.
    """

    def __init__(self, target: ModelRunner, width: int) -> None:
        pool, config = target.req_to_token_pool, target.model_config
        rows, device = pool.req_to_token.shape[0], pool.req_to_token.device
        columns = history_columns(config.context_len, target.max_total_num_tokens, width)
        self.history = torch.zeros((rows, columns), dtype=torch.int32, device=device)
        self._found = torch.zeros((rows, 2), dtype=torch.int64, device=device)
        self._vocabulary, self._width = config.vocab_size, width
        self._matches: WeakKeyDictionary[Req, int] = WeakKeyDictionary()  # length of each latest match on the host
        self._written: dict[int, tuple[weakref.ref[Req], int]] = {}  # by row: request written last, length

    def before_prefill(self, batch: ScheduleBatch) -> None:
        """Write the tokens of the requests that a prefill extends.

        Write a first chunk with its cached prefix, because the row may have held another request; of a later chunk its
        own tokens. Skip decoding requests of a mixed batch: the device has them, and the host's view lags.
        """
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        rows = zip(batch.req_pool_indices_cpu.tolist(), batch.reqs, batch.prefix_lens, strict=True)
        for row, req, prefix in rows:
            if id(req) not in decoding:
                ids = req.get_fill_ids()
                holder, written = self._written.get(row, (None, 0))
                continues = holder is not None and holder() is req and prefix <= written
                self._write(row, ids, prefix if continues else 0)
                self._written[row] = weakref.ref(req), len(ids)

    def after_prefill(self, batch: ScheduleBatch, next_token_ids: Tensor) -> None:
        """Append the first generated tokens, int64 [bs]; the next chunk overwrites that of an unfinished prompt."""
        lens = [prefix + extend for prefix, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        self._append_first(batch, next_token_ids, lens)

    def start_transferred(self, batch: ScheduleBatch, next_token_ids: Tensor) -> None:
        """Write requests that another server prefilled, and the tokens that it sampled, int64 [bs]."""
        rows, lens = batch.req_pool_indices_cpu.tolist(), batch.seq_lens_cpu.tolist()
        for row, req, length in zip(rows, batch.reqs, lens, strict=True):
            self._write(row, [*req.origin_input_ids, *req.output_ids][:length], 0)
            self._written.pop(row, None)
        self._append_first(batch, next_token_ids, lens)

    def offer(self, step: Step) -> None:
        assert step.margins is not None, "the drafter returned no margins"
        rows, last = step.batch.req_pool_indices, step.batch.seq_lens
        offer_copies(step.tokens, step.margins, self.history, self._found, rows, last, least=LEAST, unsure=UNSURE)

    def append(self, step: Step) -> Copied:
        """Append the step's committed tokens, and find matches for the next step."""
        batch, accepted = step.batch, step.accepted
        self._append(batch, batch.seq_lens, accepted.out_tokens, accepted.new_seq_lens, step.state.committed_cpu)
        rows, found = batch.req_pool_indices_cpu.numpy().tolist(), self._found
        found = found.clone() if found.is_cpu else async_d2h(found)  # which returns a tensor on the host as it is
        return Copied(self._matches, batch.reqs, rows, found, drafted=step.width > 1)

    def matched(self, reqs: Sequence[Req]) -> list[bool]:
        return [self._matches.get(req, 0) >= LEAST for req in reqs]

    def _append_first(self, batch: ScheduleBatch, next_token_ids: Tensor, lens: list[int]) -> None:
        self._found.index_fill_(0, batch.req_pool_indices, 0)  # the row's former request may have been longer
        self._append(batch, batch.seq_lens - 1, next_token_ids[:, None], batch.seq_lens, lens)

    def _append(self, batch: ScheduleBatch, after: Tensor, tokens: Tensor, newest: Tensor, lens: list[int]) -> None:
        # Append int64 [bs, w] ``tokens`` after position ``after``, then match the tokens that end at ``newest``.
        # ``lens`` is the host's view of ``newest``, which lags by up to two blocks.
        rows, bound = batch.req_pool_indices, max(lens) + 2 * self._width
        match_copies(self.history, self._found, rows, after, tokens, newest, longest=LONGEST, bound=bound)

    def _write(self, row: int, ids: Sequence[int], start: int) -> None:
        tokens = np.array(ids[start:], dtype=np.int64)  # a copy: streaming sessions change ``ids`` in place
        # Image placeholders are hashes of up to 62 bits, which a copy must not contain.
        known = (tokens >= 0) & (tokens < self._vocabulary)
        host = torch.from_numpy(np.where(known, tokens, -1).astype(np.int32))
        pin = self.history.device.type != "cpu"
        self.history[row, start : len(ids)].copy_(host.pin_memory() if pin else host, non_blocking=pin)


class Copied:
    """Copies of one step: matched ``lengths``, and accepted ``tokens`` where the drafts would have been rejected.

    Args:
        matches: length of each request's latest match; updated with the step's.
        rows: of the requests in ``found``.
        found: int64 [R, 2] of ``ops.reference.step.match_copies``; on the host when the step's accept lengths are.
        drafted: whether the step had drafts that a copy could replace.
    """

    def __init__(
        self,
        matches: WeakKeyDictionary[Req, int],
        reqs: Sequence[Req],
        rows: Sequence[int],
        found: Tensor,
        *,
        drafted: bool,
    ) -> None:
        self._matches, self._reqs, self._rows, self._found, self._drafted = matches, tuple(reqs), rows, found, drafted
        self.lengths: list[int] = []
        self.tokens = 0

    def arrived(self, accept_lens: Sequence[int]) -> None:
        """Read the copies; called when the step's results are on the host."""
        found = self._found.tolist()
        for req, row, accepted in zip(self._reqs, self._rows, accept_lens, strict=True):
            key, first = found[row]
            if self._drafted and first:
                if (known := self._matches.get(req, 0)) >= LEAST:  # the host does not know a prefill's match
                    self.lengths.append(known)
                # Where copy and draft differ at most one is right: tokens accepted from there on come from the copy.
                self.tokens += max(0, accepted - first)
            self._matches[req] = (key >> 31) & 31
        self._reqs = ()
