"""Generated tokens on the host, for custom logit processors that read their request.

SGLang passes the request to a processor (``custom_params["__req__"]``). In a block its ``output_ids`` lack the drafts
before a position, and under overlap they lag a whole step. Processors run on the host, so a batch with one waits for
the copy of the drafts, like a batch with a grammar.
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
    """A request as of one block position: ``output_ids`` end there, other attributes are the request's."""

    def __init__(self, req: Req, output_ids: list[int]) -> None:
        self._req = req
        self.output_ids = req.output_ids[:0]  # an array or a list, whichever SGLang uses
        self.output_ids.extend(output_ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._req, name)


class HostCopy:
    """Asynchronous copy of device tensors to the host; they must not be written before :meth:`wait` returns."""

    def __init__(self, *tensors: Tensor) -> None:
        self._host = [async_d2h(tensor) for tensor in tensors]
        self._done = torch.get_device_module(tensors[0].device).Event()
        self._done.record()

    def wait(self) -> list[Any]:
        """Block until the copy is complete; return the tensors as nested lists."""
        self._done.synchronize()
        return [tensor.tolist() for tensor in self._host]


class History:
    """Generated tokens of the requests whose processors read the request."""

    def __init__(self) -> None:
        self._generated: WeakKeyDictionary[Req, list[int]] = WeakKeyDictionary()
        self._arriving: list[tuple[list[tuple[int, ref[Req]]], HostCopy]] = []
        self._block: HostCopy | None = None

    def start(self, batch: ScheduleBatch) -> None:
        """Start the requests of a prefill; decoding requests of a mixed batch have been started."""
        decoding = {id(req) for req in batch.decoding_reqs or ()}
        fresh = [req for _, req in _watched(batch) if id(req) not in decoding]
        self._generated.update((req, list(req.output_ids)) for req in fresh)
        # Drop pending copies of requests that were retracted or have ended.
        settled = {id(None), *map(id, fresh)}
        waiting = [([(i, req) for i, req in rows if id(req()) not in settled], copy) for rows, copy in self._arriving]
        self._arriving = [(rows, copy) for rows, copy in waiting if rows]
        self._block = None

    def add(self, batch: ScheduleBatch, tokens: Tensor, lens: Tensor) -> None:
        """Add each request's first ``lens`` (int [bs]) of ``tokens`` (int64 [bs, w])."""
        if rows := [(i, ref(req)) for i, req in _watched(batch)]:
            self._arriving.append((rows, HostCopy(tokens, lens)))

    def copy_block(self, batch: ScheduleBatch, draft_tokens: Tensor) -> None:
        """Start the copy of the block, int64 [bs, w], before the target's forward."""
        self._block = HostCopy(draft_tokens) if any(_watched(batch)) else None

    def params(self, batch: ScheduleBatch, width: int = 1) -> list[Any]:
        """Return the processors' parameters for bs * width rows, each with the request as of its position.

        A request's first row follows its generated tokens, each later row one more draft.
        """
        params = [each for each in batch.sampling_info.custom_params for _ in range(width)]
        watched = list(_watched(batch))
        if not watched:
            return params
        self._receive()
        blocks = self._block.wait()[0] if self._block else [[]] * len(batch.reqs)
        for i, req in watched:
            for j in range(width):
                generated = self._generated[req] + blocks[i][1 : j + 1]
                params[i * width + j] = {**params[i * width + j], _REQUEST: RequestAt(req, generated)}
        return params

    def _receive(self) -> None:
        for rows, copy in self._arriving:
            tokens, lens = copy.wait()
            for i, reference in rows:
                if (req := reference()) is not None:
                    self._generated[req] += tokens[i][: lens[i]]
        self._arriving.clear()


def _watched(batch: ScheduleBatch) -> Iterator[tuple[int, Req]]:
    # Index and request of every request whose processor reads the request.
    if batch.sampling_info.has_custom_logit_processor:
        for i, params in enumerate(batch.sampling_info.custom_params):
            if isinstance(params, dict) and _REQUEST in params:
                yield i, batch.reqs[i]
