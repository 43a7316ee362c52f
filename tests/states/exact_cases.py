"""Exact verify and commit against plain decoding, token by token: bits, no tolerance.

tests/states/test_exact.py imports what runs with the CPU platform's function, and runs all of it with SGLang's Triton
kernel interpreted (``TRITON_INTERPRET=1``); on a device it runs with ``OPS_DEVICE=cuda``.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace

import pytest
import torch
from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from torch import Tensor

from sglang_dflash.features.exact import stepped
from sglang_dflash.features.exact.rows import as_rows
from tests.ops.device import DEVICE, INTERPRETED
from tests.support.gdn_replay import Blocks, decode_with_triton

KERNELS_RUN = INTERPRETED or DEVICE != "cpu"

# H, HV, K, V of the tiny hybrid target; of Qwen3.5-27B and of Qwen3.6-35B-A3B, an eighth of their heads.
TINY = {"H": 2, "HV": 4, "K": 32, "V": 32}
OF_27B, OF_35B = {"H": 2, "HV": 6, "K": 128, "V": 128}, {"H": 2, "HV": 4, "K": 128, "V": 128}
BY_LAYER, AT_ONCE = 1, stepped.SCRATCH_BYTES


def decoded(blocks: Blocks) -> tuple[Tensor, Tensor]:
    """Plain decoding of every request alone, a token at a time: outputs ``[layers, N, HV, V]``, states after each token
    ``[layers, bs, width, HV, V, K]``."""
    outputs = torch.zeros(blocks.layers, blocks.bs, blocks.width, blocks.HV, blocks.V, dtype=blocks.dtype)
    after = torch.zeros(blocks.layers, blocks.bs, blocks.width, blocks.HV, blocks.V, blocks.K, dtype=blocks.state_dtype)
    outputs, after = outputs.to(DEVICE), after.to(DEVICE)
    for layer in range(blocks.layers):
        pool = blocks.states[layer].clone()
        mixed, a, b = (x[layer].unflatten(0, (blocks.bs, -1)) for x in (blocks.qkv, blocks.a, blocks.b))
        for request in (i for i in range(blocks.bs) if blocks.live[i]):
            slot, own = blocks.slots[request : request + 1], slice(request, request + 1)
            for t in range(blocks.width):
                out = torch.empty(1, 1, blocks.HV, blocks.V, dtype=blocks.dtype, device=DEVICE)
                # a copy, as decoding's input: of one row, contiguous() is a view, whose alignment picks another kernel
                inputs = (
                    x[own, t].clone(memory_format=torch.contiguous_format) for x in (mixed[..., : -2 * blocks.HV], a, b)
                )
                stepped.fused_recurrent_gated_delta_rule_packed_decode(
                    *inputs, blocks.A_log, blocks.dt_bias, blocks.scale, pool, out, slot, True
                )
                outputs[layer, request, t], after[layer, request, t] = out[0, 0], pool[int(slot)]
    return outputs.flatten(1, 2), after


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    decode_with_triton(monkeypatch)
    if not KERNELS_RUN:
        from sglang_dflash_cpu.layers import gdn

        monkeypatch.setattr(stepped, "fused_recurrent_gated_delta_rule_packed_decode", gdn.decode)


@pytest.mark.parametrize(
    ("sizes", "scratch", "state_dtype"),
    [
        *product([TINY], [BY_LAYER, AT_ONCE], [torch.float32, torch.bfloat16]),
        pytest.param(OF_27B, AT_ONCE, torch.float32, id="27B"),
        pytest.param(OF_35B, BY_LAYER, torch.bfloat16, id="35B-A3B"),
    ],
)
def test_replayed(
    sizes: dict[str, int], scratch: int, state_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, and the state and the snapshot after any number of tokens."""
    monkeypatch.setattr(stepped, "SCRATCH_BYTES", scratch)
    width = 5
    options = {"dtype": torch.bfloat16, "state_dtype": state_dtype, "device": DEVICE, **sizes}
    blocks = Blocks(2 if sizes is TINY else 1, width, padded=True, **options)
    expected, after = decoded(blocks)
    before = blocks.states.clone()
    live = torch.tensor(blocks.live).repeat_interleave(width)  # the CPU platform computes padding, the kernel skips it
    outputs = torch.stack([blocks.run(stepped.step_verify, layer) for layer in range(blocks.layers)])
    assert torch.equal(outputs[:, live], expected[:, live])
    assert torch.equal(blocks.states[:, 1:], before[:, 1:])
    gates = [(blocks.A_log, blocks.dt_bias)] * blocks.layers
    places = torch.arange(blocks.bs, device=DEVICE) // 2  # of the requests that are not padding
    for count in range(0, width + 1, 2 if sizes is TINY else 1):  # together every number
        counts, tracked = ((count + places + ahead) % (width + 1) for ahead in (0, 5))
        pool = before.clone()
        commit(pool, blocks, gates, counts, tracked)
        for request in range(blocks.bs):
            for slots, taken in ((blocks.slots, counts), (blocks.track_slots, tracked)):
                slot, tokens = int(slots[request]), int(taken[request])
                if blocks.live[request] and tokens:
                    assert torch.equal(pool[:, slot], after[:, request, tokens - 1]), (request, tokens)
                    pool[:, slot] = before[:, slot]
        assert torch.equal(pool[:, 1:], before[:, 1:]), "another slot was written"


def commit(pool: Tensor, blocks: Blocks, gates: list[tuple[Tensor, Tensor]], counts: Tensor, tracked: Tensor) -> None:
    targets = [(blocks.slots, counts.int()), (blocks.track_slots, tracked.int())]
    stepped.step_commit(pool, blocks.records, gates, blocks.rows, blocks.slots, targets, blocks.width)


@pytest.mark.skipif(not KERNELS_RUN, reason="an attention kernel of Triton's")
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 1, 256)], ids=["tiny", "27B, a quarter"])
@pytest.mark.parametrize("tile", [32, 256])
def test_rows_of_a_block_attend_as_single_rows_of_a_decode(heads: int, kv_heads: int, dim: int, tile: int) -> None:
    """SGLang's decode kernel over all rows at once, and over one; contexts across the splits of deterministic mode."""
    width, contexts = 4, [tile - 2, 5, 2 * tile]
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16().to(DEVICE)

    reach = max(contexts) + width
    table = 1 + torch.randperm(len(contexts) * reach, generator=generator).view(len(contexts), reach).to(DEVICE)
    k, v = (normal(len(contexts) * reach + 1, kv_heads, dim) for _ in "kv")
    q = normal(len(contexts) * width, heads, dim)
    batch = SimpleNamespace(
        req_pool_indices=torch.arange(len(contexts)), seq_lens=torch.tensor(contexts), seq_lens_sum=None,
        forward_mode=None, spec_info=None,
    )  # fmt: skip
    rows = as_rows(batch, width)
    assert rows.batch_size == len(q) and rows.forward_mode.is_decode()
    assert rows.seq_lens.tolist() == [context + 1 + i for context in contexts for i in range(width)]
    assert rows.req_pool_indices.tolist() == [request for request in range(len(contexts)) for _ in range(width)]

    def attend(of: slice) -> Tensor:
        lens = rows.seq_lens[of]
        slots = [table[int(r), : int(n)] for r, n in zip(rows.req_pool_indices[of], lens, strict=True)]
        most = -(-reach // tile)
        out, lse = torch.empty_like(q[of]), torch.empty(len(lens), heads, most, device=DEVICE)
        decode_attention_fwd(
            q[of], k, v, out, torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int().to(DEVICE), torch.cat(slots),
            torch.empty(len(lens), heads, most, dim, device=DEVICE), lse, (-(-lens // tile)).int().to(DEVICE), most,
            dim**-0.5, 1.0, 1.0, enable_lean=False,
        )  # fmt: skip
        return out

    single = torch.cat([attend(slice(row, row + 1)) for row in range(len(q))])
    assert torch.equal(attend(slice(0, len(q))), single)
    assert single.isfinite().all()
