"""What custom logit processors see of their request at each position of a block."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_dflash.worker.sampling.history import History

pytestmark = pytest.mark.sglang


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(*output_ids: int) -> Request:
    return Request(origin_input_ids=array("q", [1, 2]), output_ids=array("q", output_ids), rid="r")


def batch_of(*reqs: Request | None, decoding: tuple[Request, ...] = ()) -> Any:
    """A batch in which every request (None: one without a processor) shows itself to its processor."""
    params = [None if req is None else {"budget": 3, "__req__": req} for req in reqs]
    info = SimpleNamespace(has_custom_logit_processor=any(params), custom_params=params)
    return SimpleNamespace(reqs=[req or request() for req in reqs], sampling_info=info, decoding_reqs=list(decoding))


def seen(history: History, batch: Any, block: list[list[int]]) -> list[list[int] | None]:
    history.copy_block(batch, torch.tensor(block))
    params = history.params(batch, len(block[0]))
    return [None if p is None else list(p["__req__"].output_ids) for p in params]


def ones(*tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(tokens)[:, None], torch.ones(len(tokens), dtype=torch.int64)


def test_each_position_sees_everything_before_it() -> None:
    history, req = History(), request()
    batch = batch_of(req, None)
    history.start(batch)
    history.add(batch, *ones(5, 9))
    # The host still believes that nothing was generated, as it does under overlap.
    assert seen(history, batch, [[5, 6, 7], [9, 9, 9]]) == [[5], [5, 6], [5, 6, 7], None, None, None]
    history.add(batch, torch.tensor([[6, 8, 0], [1, 1, 1]]), torch.tensor([2, 3]))
    assert seen(history, batch, [[8, 4], [1, 1]]) == [[5, 6, 8], [5, 6, 8, 4], None, None]
    assert req.output_ids == array("q")


def test_a_retracted_request_starts_from_its_own_tokens_and_a_decoding_one_goes_on() -> None:
    history, back, running = History(), request(), request()
    first = batch_of(back, running)
    history.start(first)
    history.add(first, *ones(5, 6))
    back.output_ids.extend([5, 7])
    mixed = batch_of(back, running, decoding=(running,))
    history.start(mixed)
    history.add(mixed, *ones(8, 9))
    assert seen(history, mixed, [[8], [9]]) == [[5, 7, 8], [6, 9]]
