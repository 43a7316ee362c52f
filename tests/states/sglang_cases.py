"""SGLang's own kernels around ours, of the gated delta net and of the start, under Triton's interpreter.

Not collected by itself: tests/states/test_exact.py runs it in a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.attention.fla.fused_recurrent import fused_recurrent_gated_delta_rule_packed_decode
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_update
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from torch import Tensor

from sglang_dflash import ops
from sglang_dflash.model.drafter import StagedContext
from sglang_dflash.plan import serving
from sglang_dflash.states import replay
from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from sglang_dflash.worker import forwards
from sglang_dflash.worker.forwards import Inject
from sglang_dflash.worker.start import prewarm
from sglang_dflash.worker.start.graphs import WidthGraphs, sizes_for_narrower
from sglang_dflash.worker.start.prewarm import FirstCalls
from tests.rehearsal import interpreter
from tests.support.configs import serving_plan
from tests.support.gated_delta import causal_conv, delta_rule
from tests.support.gdn_replay import Blocks, cache_params, decode_with_triton
from tests.worker.test_graphs import runner, serve_blocks_of_8

interpreter.install()

LAYERS, H, HV, K, V, WINDOW, BLOCK, REQUESTS = 2, 1, 2, 8, 8, 3, 8, 3
DIM = 2 * H * K + HV * V


def by_the_calls_width(target_verify: Callable[..., Any]) -> Callable[..., Any]:
    """SGLang's Triton verify with FlashInfer's addresses: the state of request i after position t is entry i * T + t,
    where T is the call's width. What a call does not write is no state of any request."""

    @functools.wraps(target_verify)  # the start compares its parameters
    def verify(self: Any, *, query_start_loc: Any, intermediate_states_buffer: Any, **call: Any) -> Any:
        requests = len(query_start_loc) - 1
        width = call["q"].shape[1] // requests
        intermediate_states_buffer.fill_(100.0)
        entries = intermediate_states_buffer.flatten(0, 1)[: requests * width].unflatten(0, (requests, width))
        return target_verify(self, query_start_loc=query_start_loc, intermediate_states_buffer=entries, **call)

    return verify


KERNELS = {"strides": TritonGDNKernel.target_verify, "call": by_the_calls_width(TritonGDNKernel.target_verify)}


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> MambaPool:
    """Of a server with blocks of 8, with a state kept for each token."""
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: True)  # as on CUDA
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    pool = MambaPool(
        size=2 * REQUESTS + 1,
        spec_state_size=REQUESTS,
        cache_params=cache_params(LAYERS, H, HV, K, V, WINDOW),
        mamba_layer_ids=list(range(LAYERS)),
        device="cpu",
        speculative_num_draft_tokens=BLOCK,
    )
    for tensor in (pool.mamba_cache.temporal, pool.mamba_cache.conv[0]):
        tensor.normal_()
    return pool


def graphs_of(pool: MambaPool, width: int, monkeypatch: pytest.MonkeyPatch) -> WidthGraphs:
    """What a server with this pool provides for ``width``."""
    serve_blocks_of_8(monkeypatch)
    served = runner("triton", attn_backend=None, req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    width_graphs = WidthGraphs(served, served, None, BLOCK)
    assert width_graphs.build((width, BLOCK)) == tuple(sorted({width, BLOCK}))
    return width_graphs


@pytest.mark.parametrize("addresses", KERNELS)
@pytest.mark.parametrize("width", [3, 4, BLOCK])
def test_a_commit_takes_each_requests_own_state_at_any_width(
    addresses: str, width: int, pool: MambaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's convolution, verify and commit, with a snapshot; its Triton verify, and the same with FlashInfer's
    addresses."""
    torch.manual_seed(0)
    slots, snapshots = torch.tensor([2, 5, 1], dtype=torch.int32), torch.tensor([6, 3, 4])
    last, tracked = torch.tensor([width - 1, 0, 1]), torch.tensor([0, -1, width - 1])
    x, weight = torch.randn(LAYERS, REQUESTS, DIM, width), torch.randn(DIM, WINDOW + 1)
    a, b = torch.randn(2, LAYERS, REQUESTS * width, HV).unbind()
    A_log, dt_bias = torch.rand(HV).log(), torch.randn(HV)
    states, windows = pool.mamba_cache.temporal.clone(), pool.mamba_cache.conv[0].clone()
    with graphs_of(pool, width, monkeypatch).at(width):
        for layer in range(LAYERS):
            cache = pool.mamba2_layer_cache(layer)
            mixed = causal_conv1d_update(
                x[layer].clone(), cache.conv[0], weight, None, "silu", conv_state_indices=slots,
                intermediate_conv_window=cache.intermediate_conv_window[0],
                intermediate_state_indices=torch.arange(REQUESTS, dtype=torch.int32),
            )  # fmt: skip
            verify(KERNELS[addresses], cache, mixed.transpose(1, 2), a[layer], b[layer], A_log, dt_bias, slots)
        scatter_mamba_states_after_mtp_verify(pool.mamba_cache, slots, last, snapshots, tracked)

    for layer, request in torch.cartesian_prod(torch.arange(LAYERS), torch.arange(REQUESTS)).tolist():
        slot, own = int(slots[request]), slice(request * width, (request + 1) * width)
        mixed, after = causal_conv(x[layer, request], weight, None, windows[layer, slot])
        q, k, v = torch.nn.functional.silu(mixed).T.split([H * K, H * K, HV * V], -1)
        g = -A_log.exp() * torch.nn.functional.softplus(a[layer, own] + dt_bias)
        inputs = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
        _, each = delta_rule(*inputs, g, b[layer, own].sigmoid(), states[layer, slot])
        for at, step in ((slot, int(last[request])), (int(snapshots[request]), int(tracked[request]))):
            if step >= 0:
                torch.testing.assert_close(pool.mamba_cache.temporal[layer, at], each[step].float())
                torch.testing.assert_close(pool.mamba_cache.conv[0][layer, at], after[step].float())


def verify(
    kernel: Callable[..., Tensor], cache: Any, mixed: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor,
    slots: Tensor,
) -> None:  # fmt: skip
    """As SGLang's attention backend calls it."""
    requests, width, _ = mixed.shape
    q, k, v = mixed.reshape(1, requests * width, DIM).split([H * K, H * K, HV * V], -1)
    kernel(
        TritonGDNKernel(),
        A_log=A_log,
        dt_bias=dt_bias,
        q=q.unflatten(-1, (H, K)),
        k=k.unflatten(-1, (H, K)),
        v=v.unflatten(-1, (HV, V)),
        a=a,
        b=b,
        ssm_states=cache.temporal,
        cache_indices=slots,
        query_start_loc=torch.arange(requests + 1, dtype=torch.int32) * width,
        intermediate_states_buffer=cache.intermediate_ssm,
        intermediate_state_indices=torch.arange(requests, dtype=torch.int32),
        cache_steps=width,
        retrieve_parent_token=None,
    )


# Of a result's largest value: of the outputs, which are rounded to the dtype, and of the states, which are fp32.
CLOSE = {torch.bfloat16: (2**-8, 5e-5), torch.float32: (1e-5, 1e-5)}


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_replayed_verify_is_plain_decoding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's decode, 16 tokens one by one, against one verify of ours and its commit."""
    width, layer = 16, 0
    blocks = Blocks(2, width, layers=1, K=32, V=16, dtype=dtype)
    monkeypatch.setattr(serving, "plan", serving_plan(replay=True))
    decode_with_triton(monkeypatch)
    monkeypatch.setattr(replay, "gdn_verify", gdn_verify)

    decoded, states = [], blocks.states[layer].clone()
    each = [x[layer].unflatten(0, (blocks.bs, width)) for x in (blocks.qkv, blocks.a, blocks.b)]
    for step in range(width):
        qkv, a, b = (x[:, step] for x in each)
        out = torch.empty(blocks.bs, 1, blocks.HV, blocks.V, dtype=dtype)
        fused_recurrent_gated_delta_rule_packed_decode(
            qkv[:, : -2 * blocks.HV], a, b, blocks.A_log, blocks.dt_bias, blocks.scale, states, out, blocks.slots, True
        )
        decoded.append(out)

    out = blocks.replayed(layer)
    gdn_commit(blocks.states, blocks.records, blocks.rows, blocks.slots, torch.full((blocks.bs,), width))
    slots = blocks.slots.long()
    results = (out.view(blocks.bs, width, blocks.HV, blocks.V), torch.cat(decoded, 1)), (
        blocks.states[layer, slots], states[slots],
    )  # fmt: skip
    errors = [(one.float() - other.float()).abs().max() / other.abs().max() for one, other in results]
    print(f"{dtype}: outputs {errors[0]:.2g}, states {errors[1]:.2g}")
    assert all(error <= bound for error, bound in zip(errors, CLOSE[dtype], strict=True)), errors


GUARD = 40  # rows around a memory


def a_target(requests: int) -> Any:
    return SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(requests + 1, 64, dtype=torch.int32)),
        model_config=SimpleNamespace(vocab_size=40),
        max_running_requests=requests,
        dtype=torch.float32,
        attn_backend=None,
        decode_cuda_graph_runner=None,
    )


def first_calls(target: Any, inject: Any, block: int, monkeypatch: pytest.MonkeyPatch) -> FirstCalls:
    """The first calls of a server that runs the kernels."""
    for module in (ops, prewarm):
        monkeypatch.setattr(module, "runs_kernels", lambda tensor: True)
    mamba = SimpleNamespace(enable_mamba_extra_buffer=False)
    monkeypatch.setattr(prewarm, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    monkeypatch.setattr(prewarm, "get_schedule", lambda: SimpleNamespace(page_size=1))
    monkeypatch.setattr(prewarm, "mamba_track_grid", lambda page: 256)
    return FirstCalls(serving_plan(block=block), target, inject, lambda bs, width, context: None)


def test_the_first_calls_stay_within_the_staged_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request, and blocks of 32 over a drafter of 16: 16 rows are staged."""
    monkeypatch.setattr(forwards, "draft_tp_context", nullcontext)
    plan = serving_plan(block=32)
    assert plan.drafted == 16
    columns = len(plan.drafter.target_layer_ids) * plan.drafter.hidden_size
    model: Any = SimpleNamespace(fc=SimpleNamespace(input_size=columns), write_context=lambda *_: None, staged=None)
    drafter: Any = SimpleNamespace(
        model=model, token_to_kv_pool=None, dtype=torch.float32, device="cpu", max_running_requests=1
    )
    inject = Inject(drafter, None, None)
    inject.stage(plan.drafted)
    memories = [torch.full((16 + 2 * GUARD, *part.shape[1:]), 7).to(part.dtype) for part in model.staged.tensors]
    model.staged = StagedContext(*(memory[GUARD:-GUARD] for memory in memories), None)
    first_calls(a_target(1), inject, 32, monkeypatch).run((16, 32), lambda width: nullcontext())
    assert not any(memory[GUARD].any() for memory in memories), "nothing was staged"
    for memory in memories:
        assert (memory[:GUARD] == 7).all() and (memory[-GUARD:] == 7).all()


def test_the_start_looks_up_state_slots_of_every_padded_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments: Any = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="DFLASH")
    captured = generate_decode_cuda_graph_batch_sizes(arguments, 48)
    sizes = {16: captured, 4: sizes_for_narrower(captured)}
    linear = MambaAttnBackendBase.__new__(MambaAttnBackendBase)
    vars(linear).update(
        _fused_state_indices_ok=True,  # as on CUDA
        replayssm_write_pos_list=None,
        req_to_token_pool=SimpleNamespace(
            req_index_to_mamba_index_mapping=torch.zeros(49, dtype=torch.int32), mamba_v2p_table=None
        ),
        state_indices_list=[torch.zeros(1 + i, dtype=torch.int32) for i in range(48)],
        query_start_loc_list=[torch.zeros(2 + i, dtype=torch.int32) for i in range(48)],
        cached_cuda_graph_decode_query_start_loc=torch.arange(49, dtype=torch.int32),
    )
    runner, target = SimpleNamespace(capture_bs=captured), a_target(48)
    target.attn_backend, target.decode_cuda_graph_runner = SimpleNamespace(linear_attn_backend=linear), runner

    @contextmanager
    def at_width(width: int) -> Iterator[None]:
        runner.capture_bs = sizes[width]
        yield

    def look_up(padded: int, bs: int) -> None:
        rows = torch.zeros(padded, dtype=torch.int64)
        linear._replay_metadata(padded, rows, ForwardMode.DECODE, None, None, num_padding=padded - bs)

    for size in captured:
        look_up(size, size)  # as its capture does
    inject: Any = SimpleNamespace(write=lambda *_: None, staged=None)
    first_calls(target, inject, 16, monkeypatch).run(tuple(sizes), at_width)
    at_start = interpreter.COMPILED.copy()
    for bs, buckets in itertools.product(range(1, 49), sizes.values()):
        padded = DecodeCudaGraphRunner._pad_to_bucket(bs, buckets)
        look_up(padded, bs)
        assert at_start == interpreter.COMPILED, f"compiled for a batch of {bs}, padded to {padded}"
