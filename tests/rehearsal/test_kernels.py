"""The stand-ins of attention kernels against PyTorch's own attention, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.rehearsal import flash, flashinfer_kernels
from tests.rehearsal.kernels import Misused

H, G, D, WIDTH, PAGE, LENGTHS = 4, 2, 16, 3, 16, (7, 20)
SCALE, TABLE = 0.3, [[1, 0], [3, 2]]


def numbers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def pool() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, and K/V ``[5, PAGE, G, D]``: what no request has is NaN, but page 0."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(*shape, generator=generator) for shape in ((6, H, D), (5, PAGE, G, D), (5, PAGE, G, D)))
    for each in (k, v):
        each[1, 7:] = each[2, 4:] = each[4] = torch.nan
    return q, k, v


def expected(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int = -1) -> Tensor:
    found = []
    for row, length in enumerate(LENGTHS):
        keys, values = (each[TABLE[row]].flatten(0, 1)[:length].repeat_interleave(H // G, 1) for each in (k, v))
        at, of = torch.arange(length - WIDTH, length)[:, None], torch.arange(length)[None]
        seen = (of <= at if causal else of >= 0) & (of >= at - window if window >= 0 else of >= 0)
        block = q[row * WIDTH : (row + 1) * WIDTH]
        parts = (each.transpose(0, 1) for each in (block, keys, values))
        found.append(scaled_dot_product_attention(*parts, attn_mask=seen, scale=SCALE).transpose(0, 1))
    return torch.cat(found)


def fa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, lengths: Any = LENGTHS, table: Any = TABLE
) -> Tensor:
    of = {"cache_seqlens": numbers(*lengths), "cu_seqlens_q": numbers(0, 3, 6), "page_table": torch.tensor(table).int()}
    options = {"max_seqlen_q": WIDTH, "softmax_scale": SCALE, "causal": causal, "window_size": (window, -1)}
    found: Tensor = flash.flash_attn_with_kvcache(q, k, v, **of, **options)
    return found


def trtllm(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, lengths: Any = LENGTHS, table: Any = TABLE
) -> Tensor:
    of = {"seq_lens": numbers(*lengths), "block_tables": torch.tensor(table).int(), "query": q, "max_seq_len": 32}
    of |= {"kv_cache": (k.transpose(1, 2), v.transpose(1, 2)), "workspace_buffer": torch.zeros(8, dtype=torch.uint8)}
    return flashinfer_kernels.trtllm_batch_decode_with_kv_cache(
        q_len_per_req=WIDTH, causal=causal, bmm1_scale=SCALE, bmm2_scale=1.0, window_left=window, **of
    )


def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int, lengths: Any = LENGTHS, table: Any = TABLE
) -> Tensor:
    slots = [[page * PAGE + slot for page in row for slot in range(PAGE)] for row in table]
    indices = numbers(*(slot for row, length in zip(slots, lengths, strict=True) for slot in row[:length]))
    wrapper = flashinfer_kernels.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(8), backend="fa2")
    ends, types = numbers(0, lengths[0], sum(lengths)), {"q_data_type": q.dtype, "kv_data_type": k.dtype}
    wrapper.begin_forward(numbers(0, 3, 6), ends, indices, numbers(1, 1), H, G, D, 1, window_left=window, **types)
    found: Tensor = wrapper.forward(q, (k.flatten(0, 1), v.flatten(0, 1)), causal, window_left=window, sm_scale=SCALE)
    return found


@pytest.mark.parametrize("kernel", [fa, trtllm, flashinfer])
@pytest.mark.parametrize(("causal", "window"), [(True, -1), (False, -1), (True, 5), (True, 0)])
def test_a_stand_in_attends_as_pytorch_does(kernel: Callable[..., Tensor], causal: bool, window: int) -> None:
    q, k, v = pool()
    torch.testing.assert_close(kernel(q, k, v, causal, window), expected(q, k, v, causal, window))


@pytest.mark.parametrize("kernel", [fa, trtllm, flashinfer])
@pytest.mark.parametrize(
    ("lengths", "table", "message"),
    [
        ((8, 20), TABLE, "slots that nobody wrote"),
        ((7, 21), TABLE, "slots that nobody wrote"),
        ((2, 20), TABLE, "fewer keys than queries"),
        ((7, 20), [[1, 0], [3, 9]], "pages outside of the pool"),
    ],
)
def test_a_stand_in_refuses_a_read_of_other_memory(
    kernel: Callable[..., Tensor], lengths: Any, table: Any, message: str
) -> None:
    with pytest.raises(Misused, match=message):
        kernel(*pool(), True, -1, lengths, table)


@pytest.mark.parametrize("kernel", [fa, trtllm])
def test_a_page_table_that_ends_early_is_refused(kernel: Callable[..., Tensor]) -> None:
    with pytest.raises(Misused, match="the page table ends before the request"):
        kernel(*pool(), True, -1, (7, 20), [[1], [3]])


def test_a_ragged_prefill_and_its_prefix_merge() -> None:
    """Keys of the block beside those in the pool, as a prefill with a prefix hit."""
    q, k, v = pool()
    blocks = [[each[TABLE[row]].flatten(0, 1)[n - WIDTH : n] for row, n in enumerate(LENGTHS)] for each in (k, v)]
    ragged = flashinfer_kernels.BatchPrefillWithRaggedKVCacheWrapper(torch.zeros(8))
    ragged.begin_forward(numbers(0, 3, 6), numbers(0, 3, 6), H, G, D, q_data_type=q.dtype)
    one = ragged.forward_return_lse(q, *map(torch.cat, blocks), causal=True, sm_scale=SCALE)
    paged = flashinfer_kernels.BatchPrefillWithPagedKVCacheWrapper(torch.zeros(8))
    slots = [*range(16, 20), *range(48, 64), 32]
    paged.begin_forward(
        numbers(0, 3, 6), numbers(0, 4, 21), numbers(*slots), numbers(1, 1), H, G, D, 1, q_data_type=q.dtype
    )
    other = paged.forward_return_lse(q, (k.flatten(0, 1), v.flatten(0, 1)), causal=False, sm_scale=SCALE)
    torch.testing.assert_close(flashinfer_kernels.merge_state(*one, *other)[0], expected(q, k, v, True))
