"""The histories of a batch's requests: what a prefill writes, and what the host hears of copies."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.worker.copies import Copied, Copies

pytestmark = pytest.mark.sglang

VOCABULARY = 1000


class Request(SimpleNamespace):
    __hash__ = object.__hash__

    def get_fill_ids(self) -> array[int]:
        ids: array[int] = self.ids
        return ids


def copies() -> Copies:
    pool = SimpleNamespace(req_to_token=torch.zeros(4, 80, dtype=torch.int32))
    config = SimpleNamespace(context_len=64, vocab_size=VOCABULARY)
    runner: Any = SimpleNamespace(req_to_token_pool=pool, model_config=config, max_total_num_tokens=4096)
    return Copies(runner, width=4)


def prefill(
    copies: Copies,
    requests: dict[int, Request],
    first: list[int],
    decoding: tuple[Request, ...] = (),
    prefix: int | None = None,
) -> None:
    rows, reqs = torch.tensor(list(requests)), list(requests.values())
    lens = [len(req.ids) for req in reqs]
    batch: Any = SimpleNamespace(
        req_pool_indices=rows,
        req_pool_indices_cpu=rows,
        reqs=reqs,
        decoding_reqs=list(decoding),
        prefix_lens=lens if prefix is None else [prefix] * len(reqs),
        extend_lens=[0] * len(reqs) if prefix is None else [each - prefix for each in lens],
        seq_lens=torch.tensor(lens),
    )
    copies.before_prefill(batch)
    copies.after_prefill(batch, torch.tensor(first))


def test_a_request_that_takes_a_row_over_is_written_whole_and_ids_of_images_cannot_be_copied() -> None:
    """Placeholders are hashes: cast to 32 bits, this one would be token 7."""
    held = copies()
    prefill(held, {2: Request(ids=array("q", range(1, 40)))}, [5])
    ids = array("q", [3, 4, 2**62 + 7, VOCABULARY, 4])
    prefill(held, {2: Request(ids=ids), 1: Request(ids=array("q", [9]))}, [6, 8])
    assert held.history[2, :6].tolist() == [3, 4, -1, -1, 4, 6]
    assert held.history[1, :2].tolist() == [9, 8]
    ids[0] = 77  # a streaming session goes on in the same array
    assert held.history[2, 0] == 3


def test_a_later_chunk_writes_its_own_tokens_alone_unless_the_row_had_another_holder() -> None:
    held, long = copies(), Request(ids=array("q", [1, 2, 3]))
    prefill(held, {2: long}, [9])
    held.history[2, :3] = 100  # what a second write would replace
    long.ids = array("q", [1, 2, 3, 4, 5])
    prefill(held, {2: long}, [9], prefix=3)
    assert held.history[2, :6].tolist() == [100, 100, 100, 4, 5, 9]
    prefill(held, {2: Request(ids=array("q", [7, 7, 7, 7, 7]))}, [8], prefix=3)
    assert held.history[2, :6].tolist() == [7, 7, 7, 7, 7, 8]
    prefill(held, {2: long}, [9], prefix=3)
    assert held.history[2, :6].tolist() == [1, 2, 3, 4, 5, 9]


def test_a_request_that_another_server_prefilled_is_taken_up() -> None:
    held, rows = copies(), torch.tensor([3, 1])
    reqs = [Request(origin_input_ids=array("q", ids), output_ids=array("q", [9])) for ids in ([4, 5, 6], [7, 2**62])]
    lens = torch.tensor([3, 2])
    batch: Any = SimpleNamespace(
        req_pool_indices=rows, req_pool_indices_cpu=rows, reqs=reqs, seq_lens=lens, seq_lens_cpu=lens
    )
    held.start_transferred(batch, torch.tensor([9, 8]))
    assert held.history[3, :4].tolist() == [4, 5, 6, 9] and held.history[1, :3].tolist() == [7, -1, 8]


def test_a_decoding_request_of_a_mixed_batch_keeps_what_the_host_has_not_heard() -> None:
    held, lagging = copies(), Request(ids=array("q", [1, 2]))
    prefill(held, {3: lagging}, [5])
    held.history[3, 3:5] = torch.tensor([6, 7])
    lagging.ids = array("q", [1, 2, 0, 0, 0])  # placeholders of what is on its way
    prefill(held, {3: lagging, 1: Request(ids=array("q", [9]))}, [8, 8], decoding=(lagging,))
    assert held.history[3, :6].tolist() == [1, 2, 5, 6, 7, 8]


def test_matches_and_tokens_of_copies_reach_the_host() -> None:
    held, reqs = copies(), [Request(), Request(), Request()]
    matches: Any = held._matches
    found = torch.tensor([[9 << 32, 0], [3 << 32, 0], [4 << 32, 0]])
    Copied(matches, reqs, found, drafted=False).arrived([1, 1, 1])
    assert held.matched([*reqs, Request()]) == [True, False, True, False]
    # Copies differ from drafts from positions 2 and 3 on; the first one was right up to position 5.
    step = Copied(matches, reqs, torch.tensor([[0, 2], [5 << 32, 0], [0, 3]]), drafted=True)
    step.arrived([6, 4, 2])
    assert (step.lengths, step.tokens) == ([9, 4], 4)
    assert held.matched(reqs) == [False, True, False]
