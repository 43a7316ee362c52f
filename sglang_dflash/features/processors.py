"""Custom logit processors, called as in plain decoding: once per token of their request, in order.

A processor may store state in its parameters or on its request (``custom_params["__req__"]``). It must not run on a
rejected draft.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from sglang.srt.utils.common import async_d2h, async_h2d
from torch import Tensor

from sglang_dflash.features.feature import Feature, fresh_rows

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_dflash.step.step import Step


class HostCopy:
    """Asynchronous copy of device tensors to the host. Do not write them before :meth:`wait` returns."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host = [async_d2h(tensor) for tensor in tensors]
        self._done = torch.get_device_module(tensors[0].device).Event()
        self._done.record()

    def wait(self) -> list[Any]:
        self._done.synchronize()
        return [tensor.tolist() for tensor in self._host]


class Processors(Feature):
    def __init__(self) -> None:
        self._generated: WeakKeyDictionary[Req, list[int]] = WeakKeyDictionary()
        self._arriving: list[tuple[list[tuple[int, ref[Req]]], HostCopy]] = []
        self._block: HostCopy | None = None
        self._shown: list[tuple[Req, Any]] = []

    def start(self, batch: ScheduleBatch) -> None:
        """Start a prefill's requests; complete the ``output_ids`` of the others in a mixed batch."""
        _leave_out_chunk(batch)
        processed, rows = dict(_processed(batch)), fresh_rows(batch)
        fresh = [processed.pop(row) for row in rows if row in processed]
        self._generated.update((req, list(req.output_ids)) for req in fresh)
        settled = {id(None), *map(id, fresh)}
        waiting = [([(i, req) for i, req in rows if id(req()) not in settled], copy) for rows, copy in self._arriving]
        self._arriving = [(rows, copy) for rows, copy in waiting if rows]
        self._show(processed.values())

    def begin(self, batch: ScheduleBatch, tokens: Tensor) -> None:
        self._hide()
        self._add(batch, tokens[:, None], torch.ones_like(tokens))

    def after_draft(self, step: Step) -> None:
        if step.batch.sampling_info.has_custom_logit_processor:
            self._block = HostCopy(step.tokens)

    def commit(self, step: Step) -> None:
        self._add(step.batch, step.accepted.out_tokens, step.accepted.accept_lens)

    def apply(self, batch: ScheduleBatch, logits: Tensor, sample: Callable[[int], Tensor]) -> list[Tensor]:
        """Apply the processors in place to the positions that plain decoding reaches.

        Args:
            logits: [bs, w, V], adjusted in all other ways.
            sample: returns the target's tokens at a position, int64 [bs].

        Returns:
            The results of ``sample``, until every request with a processor has rejected a draft.
        """
        assert self._block is not None, "after_draft() has not run"
        reached = dict(_processed(batch))
        blocks, info, chosen = self._block.wait()[0], batch.sampling_info, list[Tensor]()
        self._show(reached.values())
        try:
            for position in range(logits.shape[1]):
                for entry in info.custom_logit_processor.values():
                    if rows := [row for row in entry.rows if row in reached]:
                        indices = async_h2d(rows, dtype=torch.int64, device=logits.device)
                        params = [info.custom_params[row] for row in rows]
                        result = entry.processor(logits[indices, position], params)
                        logits[indices, position] = result.to(logits.dtype)
                chosen.append(sample(position))
                tokens = chosen[-1].tolist()
                drafts = {row: blocks[row][position + 1 : position + 2] for row in reached}
                reached = {row: req for row, req in reached.items() if drafts[row] == [tokens[row]]}
                if not reached:
                    break
                for row, req in reached.items():
                    req.output_ids.extend(drafts[row])
        finally:
            self._hide()
        return chosen

    def _add(self, batch: ScheduleBatch, tokens: Tensor, lens: Tensor) -> None:
        if rows := [(i, ref(req)) for i, req in _processed(batch)]:
            self._arriving.append((rows, HostCopy(tokens, lens)))

    def _show(self, reqs: Iterable[Req]) -> None:
        # until _hide(), ``output_ids`` are the tokens that the device has generated
        self._receive()
        for req in reqs:
            self._shown.append((req, req.output_ids))
            req.output_ids = req.output_ids[:0]  # an array or a list
            req.output_ids.extend(self._generated[req])

    def _hide(self) -> None:
        for req, output_ids in self._shown:
            req.output_ids = output_ids
        self._shown = []

    def _receive(self) -> None:
        for rows, copy in self._arriving:
            tokens, lens = copy.wait()
            for i, reference in rows:
                if (req := reference()) is not None:
                    self._generated[req] += tokens[i][: lens[i]]
        self._arriving.clear()


def _processed(batch: ScheduleBatch) -> Iterator[tuple[int, Req]]:
    if batch.sampling_info.has_custom_logit_processor:
        for entry in batch.sampling_info.custom_logit_processor.values():
            yield from ((row, batch.reqs[row]) for row in entry.rows)


def _leave_out_chunk(batch: ScheduleBatch) -> None:
    """Call processors for the last chunk of a prompt only: the scheduler drops the tokens of the others."""
    info = batch.sampling_info
    if batch.chunked_req is None or not info.has_custom_logit_processor:
        return
    left = {}
    for key, entry in info.custom_logit_processor.items():
        if rows := [row for row in entry.rows if batch.reqs[row] is not batch.chunked_req]:
            indices = async_h2d(rows, dtype=torch.int64, device=entry.indices.device)
            left[key] = dataclasses.replace(entry, rows=rows, indices=indices)
    info.custom_logit_processor = left
