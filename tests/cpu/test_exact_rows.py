"""Under deterministic inference a row's result does not depend on the rows next to it: bits, no tolerance."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("sglang")

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_dflash_cpu.layers import gdn
from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend
from sglang_dflash_cpu.layers.attention_math import ROW_TILE
from sglang_dflash_cpu.layers.dense import linear

pytestmark = pytest.mark.sglang

HEADS, KV_HEADS, DIM, WIDTH = 4, 2, 64, 16
LENGTHS = [5, 60, 127, 300, 505, 900]  # across multiples of the padding, and of the 512 keys of a block of torch's
EVERYONE = list(range(len(LENGTHS)))


class Attention:
    """The backend over bfloat16 K/V, with float32 queries: outputs that no rounding makes alike."""

    def __init__(self, *, by_row: bool, window: int | None = None) -> None:
        torch.manual_seed(0)
        self.table = torch.randperm(len(LENGTHS) * 1024).int().view(len(LENGTHS), 1024)
        k, v = (torch.randn(self.table.numel(), KV_HEADS, DIM).bfloat16() for _ in "kv")
        self.q = torch.randn(len(LENGTHS), WIDTH, HEADS * DIM)
        runner = SimpleNamespace(
            req_to_token_pool=SimpleNamespace(req_to_token=self.table),
            token_to_kv_pool=SimpleNamespace(get_kv_buffer=lambda _: (k, v)), kv_index_translator=None,
        )  # fmt: skip
        self.backend = TorchAttentionBackend(runner, by_row=by_row)
        self.layer = RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, 0, sliding_window_size=window or -1)

    def verify(self, requests: list[int]) -> Tensor:
        """The block of every request: ``[requests, WIDTH, H*D]``."""
        return self._forward(ForwardMode.TARGET_VERIFY, requests, torch.arange(WIDTH))

    def decode(self, requests: list[int], step: int) -> Tensor:
        return self._forward(ForwardMode.DECODE, requests, torch.tensor([step]))

    def _forward(self, mode: ForwardMode, requests: list[int], steps: Tensor) -> Tensor:
        rows, lens = torch.tensor(requests), torch.tensor(LENGTHS)[requests]
        batch = SimpleNamespace(
            forward_mode=mode, batch_size=len(rows), req_pool_indices=rows,
            seq_lens=lens + steps[0] + 1 if mode.is_decode() else lens,
            out_cache_loc=self.table[rows[:, None], lens[:, None] + steps].flatten(),
        )  # fmt: skip
        q = self.q[rows][:, steps]
        self.backend.init_forward_metadata(batch)
        return self.backend.forward_extend(q.flatten(0, 1), None, None, self.layer, batch, False).view(q.shape)


@pytest.mark.parametrize("window", [None, 100])
def test_a_verify_attends_as_decoding_does(window: int | None) -> None:
    """All requests in a block, each alone in a block, and a token at a time while requests come and go."""
    attention = Attention(by_row=True, window=window)
    together = attention.verify(EVERYONE)
    assert torch.equal(together, torch.cat([attention.verify([request]) for request in EVERYONE]))
    for step in range(WIDTH):
        running = EVERYONE[step % 5 :]
        assert torch.equal(attention.decode(running, step)[:, 0], together[running, step]), step
    (keys,) = attention.backend._rows.values()
    padded = {len(each.slots) // len(rows) for rows, each in keys}
    lens = [LENGTHS[request] + WIDTH for request in running]
    assert padded == {-(-min(length, (window or length - 1) + 1) // ROW_TILE) * ROW_TILE for length in lens}


def test_in_blocks_attention_sums_in_another_order() -> None:
    """The control: by default a verify's sums are not decoding's in any row."""
    attention = Attention(by_row=False)
    block = attention.verify(EVERYONE)
    for step in range(WIDTH):
        assert (attention.decode(EVERYONE, step)[:, 0] != block[:, step]).any(-1).all()


WEIGHT = torch.randn(8, 192, generator=torch.Generator().manual_seed(0)).bfloat16()


def small_products(x: Tensor) -> Tensor:
    return linear(x.bfloat16(), WEIGHT)


def gates(x: Tensor) -> Tensor:
    a, b = x[:, :4].bfloat16(), x[:, 4:8].bfloat16()
    return torch.cat(gdn._gates(torch.rand(4).fill_(0.5).log(), a, b, torch.ones(4)), 1)


@pytest.mark.parametrize("operation", [small_products, gates])
def test_an_operation_of_a_row(operation: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    for _ in range(300):
        x = 3 * torch.randn(64, 192)
        for rows in (1, 3, 5):
            assert torch.equal(operation(x), torch.cat([operation(part) for part in x.split(rows)]))
