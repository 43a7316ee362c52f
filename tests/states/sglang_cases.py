"""SGLang's own kernels around ours, of the gated delta net and of the start, under Triton's interpreter.

Not collected by itself: tests/ops/test_triton.py runs it in a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.kernels.ops.mamba.mamba_state_scatter_triton import scatter_mamba_states_after_mtp_verify
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.attention.linear.kernels.gdn_triton import TritonGDNKernel
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.memory_pool import MambaPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from torch import Tensor

from sglang_dflash.states import replay
from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from sglang_dflash.states.verify import record
from sglang_dflash.worker.forwards import NoDrafter
from sglang_dflash.worker.start.graphs import WidthGraphs, sizes_for_narrower
from sglang_dflash.worker.start.prewarm import FirstCalls
from tests.rehearsal import interpreter
from tests.states.exact_cases import decoded, recorded
from tests.support.configs import serving_plan
from tests.support.gdn_replay import Blocks, cache_params, decode_with_triton
from tests.worker.test_graphs import runner, serve_blocks_of_8

interpreter.install()

LAYERS, H, HV, K, V, WINDOW, BLOCK, REQUESTS = 2, 1, 2, 8, 8, 3, 8, 3
# Constants: A_log, dt_bias; the slot of each request's state, and that of its snapshot.
GATES = {"A_log": torch.tensor([0.1, 0.7]).log(), "dt_bias": torch.tensor([0.3, -0.8])}
SLOTS, SNAPSHOTS = torch.tensor([2, 5, 1], dtype=torch.int32), torch.tensor([6, 3, 4])


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> MambaPool:
    """Of a server with blocks of 8, with a state kept for each token."""
    monkeypatch.setattr(memory_pool, "conv_window_dedup_enabled", lambda *_: True)  # as on CUDA
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: True))
    return MambaPool(
        size=2 * REQUESTS + 1,
        spec_state_size=REQUESTS,
        cache_params=cache_params(LAYERS, H, HV, K, V, WINDOW),
        mamba_layer_ids=list(range(LAYERS)),
        device="cpu",
        speculative_num_draft_tokens=BLOCK,
    )


def verify(cache: Any, width: int, **inputs: Tensor) -> None:
    """SGLang's Triton verify with FlashInfer's addresses: the state of request i after position t is entry i * T + t,
    where T is the call's width. What a call does not write is no state of any request."""
    cache.intermediate_ssm.fill_(100.0)
    entries = cache.intermediate_ssm.flatten(0, 1)[: REQUESTS * width].unflatten(0, (REQUESTS, width))
    given = {name: x[:, :width].flatten(0, 1) for name, x in inputs.items()}
    TritonGDNKernel().target_verify(
        **GATES,
        **{name: x[None] if name in "qkv" else x for name, x in given.items()},
        ssm_states=cache.temporal,
        cache_indices=SLOTS,
        query_start_loc=torch.arange(REQUESTS + 1, dtype=torch.int32) * width,
        intermediate_states_buffer=entries,
        intermediate_state_indices=torch.arange(REQUESTS, dtype=torch.int32),
        cache_steps=width,
        retrieve_parent_token=None,
    )


@pytest.mark.parametrize("width", [3, 4])
def test_a_narrower_commit_takes_each_requests_own_state(
    width: int, pool: MambaPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a commit of the server's width takes it, for which SGLang lays out the states; with a snapshot."""
    torch.manual_seed(0)
    serve_blocks_of_8(monkeypatch)
    served = runner("triton", attn_backend=None, req_to_token_pool=SimpleNamespace(mamba_pool=pool))
    graphs = WidthGraphs(served, served, None, BLOCK)
    assert graphs.build((width, BLOCK)) == (width, BLOCK)
    last, tracked = torch.tensor([width - 1, 0, 1]), torch.tensor([0, -1, width - 1])
    sizes = {"q": (H, K), "k": (H, K), "v": (HV, V), "a": (HV,), "b": (HV,)}
    inputs = {name: torch.randn(LAYERS, REQUESTS, BLOCK, *size) for name, size in sizes.items()}
    before = torch.randn(pool.mamba_cache.temporal.shape)

    def committed(width: int) -> Tensor:
        pool.mamba_cache.temporal.copy_(before)
        with graphs.at(width):
            for layer in range(LAYERS):
                verify(pool.mamba2_layer_cache(layer), width, **{name: x[layer] for name, x in inputs.items()})
            scatter_mamba_states_after_mtp_verify(pool.mamba_cache, SLOTS, last, SNAPSHOTS, tracked)
        return pool.mamba_cache.temporal.clone()

    states = committed(width)
    assert torch.equal(states, committed(BLOCK))
    written = [*SLOTS.tolist(), *SNAPSHOTS[tracked >= 0].tolist()]
    assert states.abs().max() < 50 and all((states[:, slot] != before[:, slot]).any() for slot in written)


# Of a result's largest value: of the outputs, which are rounded to the dtype, and of the states, which are fp32.
CLOSE = {torch.bfloat16: (2**-8, 5e-5), torch.float32: (1e-5, 1e-5)}


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_replayed_verify_is_plain_decoding(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's decode, 16 tokens one by one, against one verify of ours and its commit."""
    decode_with_triton(monkeypatch)
    monkeypatch.setattr(replay, "gdn_verify", gdn_verify)
    blocks = Blocks(2, 16, layers=1, K=32, V=16, dtype=dtype)
    outputs, after = decoded(blocks)
    found = recorded(blocks, record)
    gdn_commit(blocks.states, blocks.records, blocks.rows, blocks.slots, torch.full((blocks.bs,), 16))
    results = (found, outputs), (blocks.states[:, blocks.slots.long()], after[:, :, -1])
    errors = [(one.float() - other.float()).abs().max() / other.abs().max() for one, other in results]
    print(f"{dtype}: outputs {errors[0]:.2g}, states {errors[1]:.2g}")
    assert all(error <= bound for error, bound in zip(errors, CLOSE[dtype], strict=True)), errors


def test_the_start_looks_up_state_slots_of_every_padded_batch() -> None:
    arguments: Any = SimpleNamespace(disable_cuda_graph_padding=False, speculative_algorithm="DFLASH")
    captured = generate_decode_cuda_graph_batch_sizes(arguments, 48)
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
    runner = SimpleNamespace(capture_bs=captured)
    target: Any = SimpleNamespace(
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(49, 64, dtype=torch.int32)),
        max_running_requests=48,
        attn_backend=SimpleNamespace(linear_attn_backend=linear),
        decode_cuda_graph_runner=runner,
    )
    calls = FirstCalls(serving_plan(), target, NoDrafter("cpu"), lambda *_: None)

    def look_up(padded: int, bs: int) -> None:
        rows = torch.zeros(padded, dtype=torch.int64)
        linear._replay_metadata(padded, rows, ForwardMode.DECODE, None, None, num_padding=padded - bs)

    for size in captured:
        look_up(size, size)  # as its capture does
    of_widths = captured, sizes_for_narrower(captured)
    for sizes in of_widths:
        runner.capture_bs = sizes
        calls._state_slots()
    at_start = interpreter.COMPILED.copy()
    for bs, sizes in itertools.product(range(1, 49), of_widths):
        padded = DecodeCudaGraphRunner._pad_to_bucket(bs, sizes)
        look_up(padded, bs)
        assert at_start == interpreter.COMPILED, f"compiled for a batch of {bs}, padded to {padded}"
