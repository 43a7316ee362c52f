"""FlashInfer 0.7, as SGLang's ``flashinfer`` and ``trtllm_mha`` backends call it.

A plan divides the lengths that the host knows among the kernel's blocks. Here the integer workspace, which is the
device's, keeps them, and a kernel raises if the device's are longer. ``plan`` compiles a sliding window and a cap of
scores in or not (``flashinfer/prefill.py``, ``get_batch_prefill_module``): SGLang passes both to ``forward`` alone,
and a verify ignores them, here too.
"""

from __future__ import annotations

import math
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tests.rehearsal import interpreter, streams
from tests.rehearsal.kernels import attend, int32, kernel, read_pages, require, unset

_PADDING = 1  # length on the host of a graph's row of padding
_LOG2 = math.log(2.0)
_BUFFERS = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")


class _Module:
    """What is compiled for a plan. SGLang's ``fast_prefill_plan`` calls :meth:`plan` too."""

    def __init__(self, window: int, cap: float | None) -> None:
        self.window, self.cap = window >= 0, bool(cap)

    def compiled(self, window: int, cap: float | None) -> dict[str, Any]:
        return {"window": window if self.window else -1, "cap": (cap or 0.0) * self.cap}

    def plan(
        self, floats: Any, ints: Tensor, pinned: Any, qo: Tensor, kv: Tensor, lens: Tensor, rows: int, bs: int, *_: Any
    ) -> list[int]:
        host = [streams.on_host(each) for each in (qo, kv, lens)]
        require(all(host) or not streams._watching, "a plan is made on the host", host)
        require(len(qo) == len(kv) == bs + 1 == len(lens) + 1, "a plan's shapes", len(qo), len(kv), len(lens), bs)
        require(int(qo[-1]) <= rows, "more rows than the graph's", int(qo[-1]), rows)
        with interpreter.pause():  # FlashInfer's own pinned memory
            known = torch.cat([torch.tensor([bs]), qo.long(), lens.long()])
            require(len(known) < len(ints), "the integer workspace is too small", len(known))
            ints[: len(known)].copy_(known)
        return [bs]


class _Wrapper:
    """ "use_cuda_graph: the auxiliary data structures will be stored in the provided buffers." """

    _cached_module: _Module

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str = "NHD", use_cuda_graph: bool = False,
        backend: str = "auto", use_tensor_cores: bool = False, **buffers: Any,
    ) -> None:  # fmt: skip
        require(kv_layout == "NHD", "not in the definition", kv_layout)
        self._float_workspace_buffer, self.device = float_workspace_buffer, float_workspace_buffer.device
        self._int_workspace_buffer = torch.zeros(4096, dtype=torch.int64, device=self.device)
        self._pin_memory_int_workspace_buffer = None
        self.is_cuda_graph_enabled, self._backend, self.use_tensor_cores = use_cuda_graph, backend, use_tensor_cores
        held = {name.replace("_buffer", "_buf"): buffer for name, buffer in buffers.items()}
        require(not use_cuda_graph or {*held} >= {*_BUFFERS[1:]}, "a graph's buffers", *held)
        require({*held} <= {*_BUFFERS}, "not in the definition", *held)
        vars(self).update({f"_{name}": held.get(name) for name in _BUFFERS})
        self._custom_mask_buf = self._qo_indptr_last = self._max_total_num_rows = None
        self._batch = len(held["paged_kv_last_page_len_buf"]) if use_cuda_graph else 0

    def _take(self, *given: Tensor | None) -> None:
        """Copy a plan's tensors into a graph's buffers; without a graph they are the buffers."""
        _, kv, indices, last = given
        bs = len(last) if last is not None else 0
        for name, each, length in zip(_BUFFERS, given, (bs + 1, bs + 1, None, bs), strict=True):
            if each is not None:
                int32(name, each, length)
                if self.is_cuda_graph_enabled:
                    require(bs == self._batch, "the batch size should be fixed in cudagraph mode", bs, self._batch)
                    buffer = getattr(self, f"_{name}")
                    require(len(each) <= len(buffer), "exceeds the allocated buffer", name, len(each), len(buffer))
                    buffer[: len(each)].copy_(each)
                else:
                    setattr(self, f"_{name}", each)

    def _of(self, heads: int, kv_heads: int, page: int, q_dtype: Any, kv_dtype: Any) -> None:
        self._planned = heads, kv_heads, page, q_dtype, kv_dtype or q_dtype

    def _as_planned(self, q: Tensor, *found: Any) -> None:
        fits = q.shape[1] <= self._planned[0] and found == self._planned[1:] and q.stride(-1) == 1
        require(fits, "another call than planned", q.shape, found, self._planned)

    def forward(
        self, q: Tensor, cache: Any, causal: bool = False, *, k_scale: Any = None, v_scale: Any = None,
        window_left: int = -1, logits_soft_cap: float | None = None, sm_scale: float | None = None, lse: bool = False,
    ) -> Any:  # fmt: skip
        held: Any = self
        keys, values = (each.unsqueeze(1) if each.dim() == 3 else each for each in cache)
        require({k_scale, v_scale} <= {None, 1.0}, "not in the definition", k_scale, v_scale)
        require(len(q) == self._qo_indptr_last, "q.shape[0] is not qo_indptr[-1]", q.shape, self._qo_indptr_last)
        self._as_planned(q, keys.shape[2], keys.shape[1], q.dtype, keys.dtype)
        out = q.new_empty(*q.shape[:-1], values.shape[-1])
        sums = q.new_empty(*q.shape[:2], dtype=torch.float32) if lse else None
        flashinfer_paged(
            *(q, (keys, values), held._qo_indptr_buf, held._paged_kv_indptr_buf, held._paged_kv_indices_buf),
            *(held._paged_kv_last_page_len_buf, self._int_workspace_buffer, out, sums),
            **{"causal": causal, "scale": sm_scale or q.shape[-1] ** -0.5},
            **self._cached_module.compiled(window_left, logits_soft_cap),
        )
        return (out, sums) if lse else out

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        return self.forward(*args, **options, lse=True)


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    """ "Note that one plan can be used for multiple run calls": the plan's lengths are the calls'."""

    def begin_forward(
        self, qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor, last_page_len: Tensor, num_qo_heads: int,
        num_kv_heads: int, head_dim: int, page_size: int, *, q_data_type: Any, kv_data_type: Any = None,
        window_left: int = -1, logits_soft_cap: Any = None, non_blocking: bool = True, **others: Any,
    ) -> None:  # fmt: skip
        unset(others)
        qo, kv, last = (each.to("cpu") for each in (qo_indptr, kv_indptr, last_page_len))  # the host waits
        self._qo_indptr_last = int(qo[-1])
        require(int(kv[-1]) <= len(kv_indices), "paged_kv_indices is too short", kv.tolist(), len(kv_indices))
        self._max_total_num_rows = self._max_total_num_rows or (self._qo_indptr_last * self.is_cuda_graph_enabled)
        self._take(qo_indptr, kv_indptr, kv_indices, last_page_len)
        self._of(num_qo_heads, num_kv_heads, page_size, q_data_type, kv_data_type)
        self._cached_module, rows = _Module(window_left, logits_soft_cap), self._max_total_num_rows or int(qo[-1])
        lens = (kv[1:] - kv[:-1] - 1) * page_size + last
        self._cached_module.plan(None, self._int_workspace_buffer, None, qo, kv, lens, rows, len(last))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def begin_forward(
        self, indptr: Tensor, indices: Tensor, last_page_len: Tensor, num_qo_heads: int, num_kv_heads: int,
        head_dim: int, page_size: int, *, q_data_type: Any, data_type: Any = None, kv_data_type: Any = None,
        window_left: int = -1, logits_soft_cap: Any = None, non_blocking: bool = True, disable_split_kv: bool = False,
        host: Tensor | None = None, **others: Any,
    ) -> None:  # fmt: skip
        unset(others)
        require(page_size == 1, "not in the definition", page_size)
        bs, kv = len(last_page_len), indptr.to("cpu") if host is None else host
        self._take(None, indptr, indices, last_page_len)
        self._of(num_qo_heads, num_kv_heads, page_size, q_data_type, kv_data_type or data_type)
        self._qo_indptr_last = bs
        if host is None:
            self._cached_module = _Module(window_left, logits_soft_cap)
            self._qo_indptr_buf = torch.arange(bs + 1, dtype=torch.int32, device=self.device)
        qo, lens = torch.arange(bs + 1), kv[1:] - kv[:-1]
        self._cached_module.plan(None, self._int_workspace_buffer, None, qo, kv, lens, bs, bs)


def fast_decode_plan(
    wrapper: Any, indptr: Tensor, *args: Any, global_override_indptr_cpu: Any = None, **o: Any
) -> None:
    """ "A faster version of plan, used for FlashInfer's CUDA graphs": with the host's lengths, nothing is copied."""
    require(wrapper.is_cuda_graph_enabled and hasattr(wrapper, "_cached_module"), "fast_decode_plan is for graphs")
    host = indptr.to("cpu") if global_override_indptr_cpu is None else global_override_indptr_cpu
    type(wrapper).begin_forward(wrapper, indptr, *args, **o, host=host)


@kernel
def flashinfer_paged(
    q: Tensor, caches: tuple[Tensor, Tensor], qo_indptr: Tensor, kv_indptr: Tensor, kv_indices: Tensor,
    last_page_len: Tensor, planned: Tensor, out: Tensor, lse: Tensor | None, *,
    causal: bool, scale: float, window: int, cap: float,
) -> None:  # fmt: skip
    starts, ends, last, page = qo_indptr.tolist(), kv_indptr.tolist(), last_page_len.tolist(), caches[0].shape[1]
    bs, known = len(last), planned.tolist()
    host_starts, host_lens = known[1 : bs + 2], known[bs + 2 : 2 * bs + 2]
    require(known[0] == bs and host_starts == starts, "planned for other queries", known[0], host_starts, starts)
    require(starts[0] == 0 == ends[0] and starts == sorted(starts) and ends == sorted(ends), "indptr", starts, ends)
    require(ends[-1] <= len(kv_indices) and starts[-1] <= len(q), "more indices than there are", ends, len(kv_indices))
    out.fill_(math.nan)
    for row, (start, end, first, stop) in enumerate(zip(starts, starts[1:], ends, ends[1:], strict=False)):
        length = (stop - first - 1) * page + last[row] if stop > first else 0
        fits = host_lens[row] >= length or host_lens[row] <= _PADDING
        require(fits or end == start, "planned for fewer keys", host_lens, row, length)
        sums: Any = -math.inf
        if length and end > start:
            k, v, _ = read_pages(caches, kv_indices[first:stop], length, (end - start) * causal, -1)
            out[start:end], sums = attend(q[start:end], k, v, scale, causal=causal, window=(window, -1), cap=cap)
        else:
            out[start:end] = 0
        if lse is not None:
            lse[start:end] = sums / _LOG2


class BatchPrefillWithRaggedKVCacheWrapper(_Wrapper):
    def begin_forward(
        self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        *, q_data_type: Any, window_left: int = -1, logits_soft_cap: Any = None, **others: Any,
    ) -> None:  # fmt: skip
        unset(others)
        int32("qo_indptr", qo_indptr)
        int32("kv_indptr", kv_indptr, len(qo_indptr))
        self._ends, self._host = (qo_indptr, kv_indptr), (qo_indptr.to("cpu").tolist(), kv_indptr.to("cpu").tolist())
        self._of(num_qo_heads, num_kv_heads, 1, q_data_type, None)
        self._cached_module = _Module(window_left, logits_soft_cap)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, window_left: int = -1,
        logits_soft_cap: float | None = None, sm_scale: float | None = None, lse: bool = False,
    ) -> Any:  # fmt: skip
        self._as_planned(q, k.shape[1], 1, q.dtype, k.dtype)
        out, sums = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:2], dtype=torch.float32)
        options = {"causal": causal, "scale": sm_scale or q.shape[-1] ** -0.5}
        options |= self._cached_module.compiled(window_left, logits_soft_cap)
        flashinfer_ragged(q, k, v, *self._ends, *map(tuple, self._host), out, sums, **options)
        return (out, sums) if lse else out


@kernel
def flashinfer_ragged(
    q: Tensor, k: Tensor, v: Tensor, qo_indptr: Tensor, kv_indptr: Tensor, qo: tuple[int, ...], kv: tuple[int, ...],
    out: Tensor, lse: Tensor, *, causal: bool, scale: float, window: int, cap: float,
) -> None:  # fmt: skip
    starts, ends = tuple(qo_indptr.tolist()), tuple(kv_indptr.tolist())
    require(starts == qo and ends == kv, "planned for other tokens", starts, qo, ends, kv)
    require(starts[-1] <= len(q) and ends[-1] <= len(k), "indptr", starts, ends, len(q), len(k))
    out.fill_(math.nan)
    for start, end, first, stop in zip(starts, starts[1:], ends, ends[1:], strict=False):
        if end > start:
            rows = q[start:end], k[first:stop], v[first:stop]
            out[start:end], sums = attend(*rows, scale, causal=causal, window=(window, -1), cap=cap)
            lse[start:end] = sums / _LOG2


def merge_state(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor) -> tuple[Tensor, Tensor]:
    """ "Merge the attention output and the logsumexp value of two KV-segments"; logarithms of base 2."""
    out, lse = torch.empty_like(v_a), torch.empty_like(s_a)
    flashinfer_merge(v_a, s_a, v_b, s_b, out, lse)
    return out, lse


@kernel
def flashinfer_merge(v_a: Tensor, s_a: Tensor, v_b: Tensor, s_b: Tensor, out: Tensor, lse: Tensor) -> None:
    require(s_a.dtype == s_b.dtype == torch.float32 and s_a.is_contiguous() and s_b.is_contiguous(), "lse")
    total = torch.logaddexp2(s_a, s_b)
    seen = total.masked_fill(total == -math.inf, 0)
    out.copy_(v_a * torch.exp2(s_a - seen)[..., None] + v_b * torch.exp2(s_b - seen)[..., None])
    lse.copy_(total)


# --- TensorRT-LLM's kernels, of ``trtllm_mha``


def trtllm_batch_decode_with_kv_cache(*, q_len_per_req: int = 1, **options: Any) -> Tensor:
    """ "query: [num_tokens, num_heads, head_dim]", with ``num_tokens = q_len_per_req * batch_size``."""
    bs, tokens = len(options["seq_lens"]), len(options["query"])
    require(tokens == bs * q_len_per_req, "query is not [batch * q_len_per_req]", tokens, bs, q_len_per_req)
    return _trtllm(starts=None, width=q_len_per_req, **options)


def trtllm_batch_context_with_kv_cache(
    *, batch_size: int, cum_seq_lens_q: Tensor, cum_seq_lens_kv: Tensor, max_q_len: int, max_kv_len: int, **options: Any
) -> Tensor:
    """ "cum_seq_lens_kv: cumulative sequence length for key"."""
    require(batch_size == len(options["seq_lens"]), "batch_size", batch_size)
    int32("cum_seq_lens_q", cum_seq_lens_q, batch_size + 1)
    int32("cum_seq_lens_kv", cum_seq_lens_kv, batch_size + 1)
    of_context = {"kv_starts": cum_seq_lens_kv, "max_seq_len": max_kv_len}
    return _trtllm(starts=cum_seq_lens_q, width=max_q_len, **of_context, **options)


def _trtllm(
    *, query: Tensor, kv_cache: Any, workspace_buffer: Tensor, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int,
    starts: Tensor | None, width: int, bmm1_scale: float, bmm2_scale: float, window_left: int = -1, out: Any = None,
    out_dtype: Any = None, sinks: Any = None, causal: bool = True, kv_starts: Tensor | None = None,
    multi_ctas_kv_counter_buffer: Any = None, **others: Any,
) -> Tensor:  # fmt: skip
    unset(others)
    (keys, values), bs, counters = kv_cache, len(seq_lens), multi_ctas_kv_counter_buffer
    require(isinstance(bmm1_scale, float) and isinstance(bmm2_scale, float), "scales", bmm1_scale, bmm2_scale)
    int32("seq_lens", seq_lens, bs)
    require(block_tables.dtype == torch.int32 and block_tables.is_contiguous(), "block_tables", block_tables.dtype)
    require(block_tables.dim() == 2 and len(block_tables) == bs, "block_tables", block_tables.shape, bs)
    require(keys.dim() == 4 and keys.shape[:3] == values.shape[:3], "K/V are [pages, heads, page, D]", keys.shape)
    require(keys.stride(-1) == 1 == values.stride(-1) and keys.shape[2] in (16, 32, 64, 128), "page size", keys.shape)
    require(query.dim() == 3 and query.stride(-1) == 1 and query.shape[1] % keys.shape[1] == 0, "query", query.shape)
    require(workspace_buffer.element_size() == 1 and workspace_buffer.is_contiguous(), "workspace_buffer")
    require(sinks is None or sinks.dtype == torch.float32, "sinks are float32", sinks)
    room = counters is None or counters.numel() * counters.element_size() >= 4 * bs * query.shape[1]
    require(room, "multi_ctas_kv_counter_buffer", bs, query.shape)
    out = query.new_empty(*query.shape[:-1], values.shape[-1], dtype=out_dtype) if out is None else out
    numbers = {"width": width, "longest": max_seq_len, "scales": (bmm1_scale, bmm2_scale), "window": window_left}
    trtllm_paged(query, (keys, values), block_tables, seq_lens, starts, kv_starts, sinks, out, causal=causal, **numbers)
    return out


@kernel
def trtllm_paged(
    query: Tensor, caches: tuple[Tensor, Tensor], tables: Tensor, seq_lens: Tensor, q_starts: Tensor | None,
    kv_starts: Tensor | None, sinks: Tensor | None, out: Tensor, *, width: int, longest: int,
    scales: tuple[float, float], causal: bool, window: int,
) -> None:  # fmt: skip
    lengths = seq_lens.tolist()
    starts = [*range(0, len(query) + 1, width)] if q_starts is None else q_starts.tolist()
    require(starts[0] == 0 and starts == sorted(starts) and starts[-1] <= len(query), "starts", starts, len(query))
    require(max(lengths) <= longest, "max_seq_len is too small", lengths, longest)
    ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
    require(kv_starts is None or kv_starts.tolist() == ends, "cum_seq_lens_kv", kv_starts, ends)
    out.fill_(math.nan)
    by_page = caches[0].transpose(1, 2), caches[1].transpose(1, 2)
    for row, (length, start, end) in enumerate(zip(lengths, starts, starts[1:], strict=False)):
        require(end - start <= width, "max_q_len is too small", width, end - start)
        if end > start:
            k, v, first = read_pages(by_page, tables[row], length, end - start, window)
            options: Any = {"first": first, "causal": causal, "window": (window, -1), "sinks": sinks}
            out[start:end] = attend(query[start:end], k, v, scales[0], **options)[0] * scales[1]


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return partial(require, False, "not in the definition", name)


def modules() -> dict[str, ModuleType]:
    """What is imported as ``flashinfer``."""
    wrappers = BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper
    functions: dict[str, tuple[Any, ...]] = {
        "flashinfer": (*wrappers, BatchPrefillWithRaggedKVCacheWrapper, fast_decode_plan),
        "flashinfer.cascade": (merge_state,),
        "flashinfer.decode": (trtllm_batch_decode_with_kv_cache, fast_decode_plan),
        "flashinfer.prefill": (trtllm_batch_context_with_kv_cache,),
        "flashinfer.utils": (),
    }
    found = {name: ModuleType(name) for name in functions}
    for name, module in found.items():
        vars(module).update({each.__name__: each for each in functions[name]})
    package, utils = found["flashinfer"], found["flashinfer.utils"]
    vars(package).update(__path__=[], __getattr__=_absent)
    vars(package).update({name.partition(".")[2]: module for name, module in found.items() if "." in name})
    counters = {"get_trtllm_gen_multi_ctas_kv_counter_bytes": lambda bs, heads, sms: 4 * bs * heads}
    vars(utils).update(counters, get_device_sm_count=lambda device: 4)
    return found
