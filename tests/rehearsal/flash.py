"""FlashAttention 3 and 4, as SGLang calls them: ``sgl_kernel.flash_attn``, ``sglang.kernels.ops.attention``.

Refusals of FlashAttention 3: ``hopper/flash_api.cpp``, ``mha_fwd`` and ``mha_fwd_get_scheduler_metadata``; of 4:
``flash_attn/cute/interface.py``.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal.kernels import attend, int32, kernel, read_pages, require, unset


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, page_table: Tensor, cu_seqlens_q: Tensor,
    max_seqlen_q: int, softmax_scale: float | None = None, causal: bool = False, window_size: Any = (-1, -1),
    softcap: float = 0.0, scheduler_metadata: Any = None, sinks: Any = None, return_softmax_lse: bool = False,
    out: Any = None, num_splits: int = 0, ver: int = 3, max_seqlen_k: Any = None, cu_seqlens_k_new: Any = None,
    **others: Any,
) -> Any:  # fmt: skip
    """ "If causal=True, the causal mask is aligned to the bottom right corner of the attention matrix."

    ``num_splits`` and ``max_seqlen_k`` change no result, nor does ``cu_seqlens_k_new`` without new keys.
    """
    unset({name: value for name, value in others.items() if name != "rotary_interleaved"})
    bs, heads = len(cache_seqlens), q.shape[1]
    require(q.dim() == 3 and q.stride(-1) == 1, "q must be [tokens, heads, D]", q.shape, q.stride())
    require(q.dtype == k_cache.dtype == v_cache.dtype, "query and key must have the same dtype", q.dtype, k_cache.dtype)
    require(k_cache.dim() == 4 and k_cache.shape[:3] == v_cache.shape[:3], "a cache's shape", k_cache.shape)
    require(k_cache.stride(-1) == 1 == v_cache.stride(-1), "a cache must have a contiguous last dimension")
    require(heads % k_cache.shape[2] == 0 and q.shape[2] == k_cache.shape[3], "heads", q.shape, k_cache.shape)
    int32("cache_seqlens", cache_seqlens, bs)
    int32("cu_seqlens_q", cu_seqlens_q, bs + 1)
    require(page_table.dtype == torch.int32 and page_table.stride(-1) == 1, "page_table must be int32, contiguous")
    require(page_table.dim() == 2 and len(page_table) == bs, "page_table must have batch_size rows", page_table.shape)
    require(sinks is None or sinks.shape == (heads,), "sinks")
    # "FP8 only supports bf16 as output"
    dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1], dtype=dtype) if out is None else out
    lse = q.new_empty(heads, len(q), dtype=torch.float32) if return_softmax_lse else None
    flash_attention(
        *(q, (k_cache, v_cache), page_table, cache_seqlens, cu_seqlens_q, sinks, scheduler_metadata, out, lse),
        **{"longest": max_seqlen_q, "scale": softmax_scale or q.shape[-1] ** -0.5, "causal": causal},
        **{"window": tuple(window_size), "cap": softcap},
    )
    return (out, lse) if return_softmax_lse else out


def fourth_with_kvcache(q: Tensor, *args: Any, **options: Any) -> Any:
    """ "SM100 forward with head_dim=256 does not support seqused_q/seqused_k", which a K/V cache passes."""
    require(q.shape[-1] <= 128, "SM100 forward with heads above 128", q.shape)
    require(options.get("scheduler_metadata") is None, "FlashAttention 3's scheduler_metadata")
    return flash_attn_with_kvcache(q, *args, **options)


@kernel
def flash_attention(
    q: Tensor, caches: tuple[Tensor, Tensor], page_table: Tensor, cache_seqlens: Tensor, cu_seqlens_q: Tensor,
    sinks: Tensor | None, scheduled: Tensor | None, out: Tensor, lse: Tensor | None, *,
    longest: int, scale: float, causal: bool, window: tuple[int, int], cap: float,
) -> None:  # fmt: skip
    lengths, starts = cache_seqlens.tolist(), cu_seqlens_q.tolist()
    found = lengths if scheduled is None else scheduled.tolist()[1 : 1 + len(lengths)]
    require(found == lengths, "scheduler_metadata of other lengths", found, lengths)
    require(starts[0] == 0 and starts == sorted(starts) and starts[-1] <= len(q), "cu_seqlens_q", starts, len(q))
    out.fill_(math.nan)
    for row, (length, start, end) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
        require(end - start <= longest, "max_seqlen_q is too small", longest, end - start)
        if end > start:
            k, v, first = read_pages(caches, page_table[row], length, end - start, window[0])
            options: Any = {"first": first, "causal": causal, "window": window, "cap": cap, "sinks": sinks}
            out[start:end], sums = attend(q[start:end], k, v, scale, **options)
            if lse is not None:
                lse[:, start:end] = sums.T


def get_scheduler_metadata(*, batch_size: int, max_seqlen_k: int, cache_seqlens: Tensor, **_: Any) -> Tensor:
    """One semaphore, then four numbers per request; here the first ones are the lengths that it was made for."""
    int32("cache_seqlens", cache_seqlens, batch_size)
    found = cache_seqlens.new_empty(1 + (batch_size + 3) // 4 * 16)
    flash_schedule(cache_seqlens, found, longest=max_seqlen_k)
    return found


@kernel
def flash_schedule(cache_seqlens: Tensor, found: Tensor, *, longest: int) -> None:
    require(longest >= int(cache_seqlens.max()), "max_seqlen_k is too small", longest, cache_seqlens.tolist())
    found[1 : 1 + len(cache_seqlens)] = cache_seqlens


def undefined(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError


def modules() -> dict[str, ModuleType]:
    """What is imported as ``sgl_kernel``."""
    package, flash = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    vars(package).update(__path__=[], merge_state_v2=undefined, flash_attn=flash)
    functions = {"flash_attn_with_kvcache": flash_attn_with_kvcache, "get_scheduler_metadata": get_scheduler_metadata}
    vars(flash).update(functions, flash_attn_varlen_func=undefined)
    return {"sgl_kernel": package, "sgl_kernel.flash_attn": flash}
