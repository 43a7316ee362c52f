"""Where the positions of a ragged verify lie in whole blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from sglang_dflash.cpu.layers.ragged import gdn_forward_extend, rows_of, spread


def batch(lens: list[int] | None) -> Any:
    layout = None if lens is None else SimpleNamespace(verify_lens=torch.tensor(lens))
    return SimpleNamespace(batch_size=2, spec_info=SimpleNamespace(draft_token_num=3, ragged_verify_layout=layout))


def test_each_request_starts_its_own_block() -> None:
    rows = rows_of(batch([2, 3]))
    assert rows is not None and rows.tolist() == [0, 1, 3, 4, 5]
    assert spread(torch.tensor([1, 2, 3, 4, 5]), rows, 6).tolist() == [1, 2, 0, 3, 4, 5]


def test_whole_blocks_and_plain_decoding_have_no_holes() -> None:
    assert rows_of(batch(None)) is None
    assert rows_of(SimpleNamespace(spec_info=None)) is None


def test_recurrent_layers_get_whole_blocks_and_give_the_verified_positions() -> None:
    def whole(self: Any, layer: Any, forward_batch: Any, qkv: Any, a: Any, b: Any) -> Any:
        assert qkv.tolist() == [[1.0], [0.0], [0.0], [2.0], [3.0], [0.0]]
        return (qkv + 10)[None]

    x = torch.tensor([[1.0], [2.0], [3.0]])
    assert gdn_forward_extend(whole, None, None, batch([1, 2]), x, x, x).tolist() == [[[11.0], [12.0], [13.0]]]
