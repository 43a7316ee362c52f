"""Generated tokens on the host, for custom logit processors that look at their request.

SGLang shows a processor the request itself (``custom_params["__req__"]``). In a block that is not enough: its
``output_ids`` end before the drafts that a position follows, and under overlap they lag by a whole step. Processors run
on the host, so a batch that has some waits for the drafts' copy, and so does a batch with a grammar.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from sglang_dflash.upstream import async_d2h

if TYPE_CHECKING:
    from sglang_dflash.upstream import Req, ScheduleBatch

_REQUEST = "__req__"


class RequestAt:
    """A request with the history of one block position; everything else is read from the request.

    Args:
        req: the request.
        output_ids: everything generated up to and including that position.
    """

    def __init__(self, req: Req, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids[:0]  # an array or a list, whichever SGLang uses
        self.output_ids.extend(output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class HostCopy:
    """Device tensors on their way to the host.

    Args:
        tensors: must not be written before :meth:`wait`.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self._host = [async_d2h(tensor) for tensor in tensors]
        self._done = torch.get_device_module(tensors[0].device).Event()
        self._done.record()

    def wait(self) -> list[Any]:
        """The tensors as nested lists."""
        self._done.synchronize()
        return [tensor.tolist() for tensor in self._host]


class History:
    """Generated tokens of the requests whose processors may look at them; empty while there are none."""

    def __init__(self) -> None:
        self._generated: WeakKeyDictionary[Req, list[int]] = WeakKeyDictionary()
        self._arriving: list[tuple[list[tuple[int, ref[Req]]], HostCopy]] = []
        self._block: HostCopy | None = None

    def start(self, batch: ScheduleBatch) -> None:
        """Before a prefill: take up its requests. Those that only ride along (mixed batch) are known."""
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        fresh = [req for _, req in _watched(batch) if id(req) not in decoding]
        self._generated.update((req, list(req.output_ids)) for req in fresh)
        # Drop what is on its way for requests that were retracted or are gone.
        settled = {id(None), *map(id, fresh)}
        waiting = [([(i, req) for i, req in rows if id(req()) not in settled], copy) for rows, copy in self._arriving]
        self._arriving = [(rows, copy) for rows, copy in waiting if rows]
        self._block = None

    def add(self, batch: ScheduleBatch, tokens: Tensor, lens: Tensor) -> None:
        """Each request's first ``lens`` (int [bs]) of ``tokens`` (int64 [bs, w]) are generated."""
        if rows := [(i, ref(req)) for i, req in _watched(batch)]:
            self._arriving.append((rows, HostCopy(tokens, lens)))

    def expect(self, batch: ScheduleBatch, draft_tokens: Tensor) -> None:
        """Before the target's forward: start the copy of the block, int64 [bs, w]."""
        self._block = HostCopy(draft_tokens) if any(_watched(batch)) else None

    def params(self, batch: ScheduleBatch, width: int = 1) -> list[Any]:
        """The processors' parameters for bs * width rows, each with the request as of its position.

        A request's first row, in a prefill its only one, follows what it has generated, each other one a draft more.
        """
        params = [each for each in batch.sampling_info.custom_params for _ in range(width)]
        watched = list(_watched(batch))
        if not watched:
            return params
        self._settle()
        blocks = self._block.wait()[0] if self._block else [[]] * len(batch.reqs)
        for i, req in watched:
            for j in range(width):
                generated = self._generated[req] + blocks[i][1 : j + 1]
                params[i * width + j] = {**params[i * width + j], _REQUEST: RequestAt(req, generated)}
        return params

    def _settle(self) -> None:
        for rows, copy in self._arriving:
            tokens, lens = copy.wait()
            for i, reference in rows:
                if (req := reference()) is not None:
                    self._generated[req] += tokens[i][: lens[i]]
        self._arriving.clear()


def _watched(batch: ScheduleBatch) -> Iterator[tuple[int, Req]]:
    """Row and request of every request whose processor is shown the request."""
    if batch.sampling_info.has_custom_logit_processor:
        for i, params in enumerate(batch.sampling_info.custom_params):
            if isinstance(params, dict) and _REQUEST in params:
                yield i, batch.reqs[i]
