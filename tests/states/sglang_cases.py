"""SGLang's lookup of state slots at the start, under Triton's interpreter.

Not collected by itself: tests/ops/test_triton.py runs it in a process with ``TRITON_INTERPRET=1``.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.arg_groups.cuda_graph_hook import generate_decode_cuda_graph_batch_sizes
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

from sglang_dflash.worker.forwards import NoDrafter
from sglang_dflash.worker.start.graphs import sizes_for_narrower
from sglang_dflash.worker.start.prewarm import FirstCalls
from tests.rehearsal import interpreter
from tests.support.configs import serving_plan

interpreter.install()


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
