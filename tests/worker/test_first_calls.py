"""The products of the drafter's context that the start runs, so that none is compiled under traffic."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch

pytest.importorskip("sglang")

from sglang_dflash.worker.forwards import CHUNK
from sglang_dflash.worker.start import prewarm
from tests.support.configs import serving_plan

pytestmark = pytest.mark.sglang

CUTLASS = (
    *("cuda", "cuda.bindings", "cuda.bindings.driver", "cutlass", "cutlass.utils", "cutlass.utils.blackwell_helpers"),
    *("cutlass.cute", "cutlass.cute.nvgpu", "cutlass.cute.runtime"),
)


@pytest.mark.parametrize("multiprocessors", [148, 160])  # of a B200 and a B300
def test_the_start_runs_every_product_that_sglang_chooses_by_the_number_of_tokens(
    multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prewarm, "get_bf16_gemm_backend", lambda: SimpleNamespace(is_cutedsl=lambda: True))
    run: set[int] = set()
    inject: Any = SimpleNamespace(write=lambda hidden, rows, at, slots: run.add(len(slots)), queue=None)
    pool = SimpleNamespace(req_to_token=torch.zeros(1, 1))
    target: Any = SimpleNamespace(req_to_token_pool=pool, max_running_requests=1, dtype=torch.bfloat16)
    prewarm.FirstCalls(serving_plan(), target, inject, lambda bs, width, context: None)._context_kv(inject)
    with patch.dict(sys.modules, {name: MagicMock() for name in CUTLASS}):
        from sglang.kernels.ops.gemm import cutedsl_bf16_gemm as product
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(product, "get_device_sm", lambda: 100)
    monkeypatch.setattr(product, "get_device_core_count", lambda device: multiprocessors)

    def chosen(tokens: Any, hidden: int, captured: int) -> set[int]:
        of_fc = hidden, captured * hidden
        return {product._pick_tactic(n, *of_fc) for n in tokens if product.use_cutedsl_bf16_gemm(n, *of_fc)}

    drafters = [(hidden, captured) for hidden in range(512, 6145, 128) for captured in range(1, 6144 // hidden + 1)]
    late = {shape: chosen(range(1, CHUNK + 1), *shape) - chosen(run, *shape) for shape in drafters}
    assert not {shape: tactics for shape, tactics in late.items() if tactics}
    assert chosen(run, 2560, 2), "no product of these was chosen"
