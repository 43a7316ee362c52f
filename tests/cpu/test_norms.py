"""Norms, projection splits and sigmoid gates of the CPU platform against their formulas in float64."""

from __future__ import annotations

import inspect

import pytest
import torch
from sglang.srt.layers import layernorm
from torch import Tensor

from sglang_dflash_cpu.layers import dense, gdn

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5}}


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, eps: float, activation: str) -> Tensor:
    x, weight, gate = x.double(), weight.double(), gate.double()
    act = gate.sigmoid() if activation == "sigmoid" else gate * gate.sigmoid()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight * act


@DTYPES
@pytest.mark.parametrize("activation", ["swish", "silu", "sigmoid"])
@pytest.mark.parametrize("eps", [1e-6, 1e-1])
def test_gated_norms(dtype: torch.dtype, activation: str, eps: float) -> None:
    x, weight, z = (
        normal(12, 16, dtype=dtype),
        normal(16, dtype=dtype, seed=1),
        normal(12, 16, dtype=dtype, seed=2),
    )
    expected = gated_norm(x, weight, z, eps, activation)
    kept = x.clone()
    for result in (
        dense.rms_norm_gated(x, z, weight, None, activation, residual=None, eps=eps),
        dense.layernorm_gated(x, weight, None, z=z, eps=eps, is_rms_norm=True, activation=activation),
    ):
        assert result.dtype == dtype
        torch.testing.assert_close(result, expected.to(dtype), **TOLERANCE[dtype])
    assert torch.equal(x, kept)


@pytest.mark.parametrize(
    "options",
    [{"is_rms_norm": False}, {"norm_before_gate": False}, {"group_size": 8}, {"z": None}],
    ids=lambda options: next(iter(options)),
)
def test_other_norms_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(NotImplementedError, match="layernorm_fn"):
        dense.layernorm_gated(normal(2, 16), normal(16), None, **({"z": normal(2, 16), "is_rms_norm": True} | options))
    with pytest.raises(NotImplementedError, match="rms_norm_gated"):
        dense.rms_norm_gated(normal(2, 16), normal(2, 16), normal(16), None, prenorm=True)


@pytest.mark.parametrize(("H", "HV"), [(1, 1), (2, 2), (2, 4), (3, 12)])
@pytest.mark.parametrize("grouped", [True, False])
def test_projections_are_split_head_by_head(H: int, HV: int, grouped: bool) -> None:
    K, V, tokens, ratio = 4, 6, 5, HV // H
    q, k = normal(tokens, H, K, seed=1), normal(tokens, H, K, seed=2)
    v, z = normal(tokens, HV, V, seed=3), normal(tokens, HV, V, seed=4)
    b, a = normal(tokens, HV, seed=5), normal(tokens, HV, seed=6)
    parts, gate_parts = (q, k, v, z), (b, a)
    if grouped:
        groups = [
            [q[:, h], k[:, h], v[:, h * ratio : (h + 1) * ratio], z[:, h * ratio : (h + 1) * ratio]] for h in range(H)
        ]
        parts = tuple(part for group in groups for part in group)
        gate_parts = tuple(x[:, h * ratio : (h + 1) * ratio] for h in range(H) for x in (b, a))
    qkvz = torch.cat([part.reshape(tokens, -1) for part in parts], -1)
    ba = torch.cat(gate_parts, -1)
    split = gdn.split_grouped if grouped else gdn.split
    mixed_qkv, z_out, b_out, a_out = split(qkvz, ba, H, HV, K, V)
    assert torch.equal(mixed_qkv, torch.cat([x.reshape(tokens, -1) for x in (q, k, v)], -1))
    assert torch.equal(z_out, z) and torch.equal(b_out, b) and torch.equal(a_out, a)


@DTYPES
@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("strided", [True, False])
def test_sigmoid_mul(dtype: torch.dtype, inplace: bool, strided: bool) -> None:
    attn = normal(5, 12, dtype=dtype)
    gate = normal(5, 3, 8, dtype=dtype, seed=1)[..., 4:] if strided else normal(5, 12, dtype=dtype, seed=1)
    expected = (attn.double() * gate.reshape(5, 12).double().sigmoid()).to(dtype)
    kept, kept_gate = attn.clone(), gate.clone()
    out = dense.sigmoid_mul(attn, gate, inplace=inplace)
    torch.testing.assert_close(out, expected, **TOLERANCE[dtype])
    assert torch.equal(attn, out if inplace else kept) and torch.equal(gate, kept_gate)
    with pytest.raises(NotImplementedError, match="FP8"):
        dense.sigmoid_mul(attn, gate, quant=True)


@DTYPES
def test_shared_expert_is_added_in_place(dtype: torch.dtype) -> None:
    hidden, weight = normal(5, 12, dtype=dtype), normal(12, dtype=dtype, seed=1)
    shared, routed = normal(5, 12, dtype=dtype, seed=2), normal(5, 12, dtype=dtype, seed=3)
    gate = (hidden.double() @ weight.double()).sigmoid()[:, None]
    expected = (routed.double() + gate * shared.double()).to(dtype)
    dense.add_gated(hidden, weight, shared, routed)
    torch.testing.assert_close(routed, expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("name", ["RMSNorm", "GemmaRMSNorm"])
def test_a_layers_norm_is_sglangs(name: str, residual: bool) -> None:
    layer = getattr(layernorm, name)(24, eps=1e-2)
    layer.weight.data.copy_(normal(24, seed=3))
    stand_in = {"RMSNorm": dense.rms_norm, "GemmaRMSNorm": dense.gemma_rms_norm}[name]
    original = inspect.unwrap(getattr(layernorm, name).forward_native)
    for dtype in (torch.float32, torch.bfloat16):
        args = (normal(5, 24, dtype=dtype), *([normal(5, 24, dtype=dtype, seed=1)] if residual else []))
        kept = [arg.clone() for arg in args]
        got, want = stand_in(original, layer, *args), original(layer, *args)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
        assert all(torch.equal(arg, was) for arg, was in zip(args, kept, strict=True))
