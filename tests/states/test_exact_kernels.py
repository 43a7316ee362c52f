"""What exact mode requires of SGLang's kernels as Triton compiles them, for GPUs that are not here.

A verify must launch the very compilation of plain decoding: Triton compiles by the divisibility of addresses and
integers by 16, and a row that begins 8 bytes off changes the state's bits, so a step asserts where rows begin. A commit
launches another compilation, with the heads of all layers side by side, whose arithmetic must be the same, as must that
of plain decoding's fused convolution and of a verify's. A bump of SGLang or Triton fails here, not at a user. That the
start launches every compilation: ``tests/rehearsal``.
"""

from __future__ import annotations

import collections
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from sglang_dflash.features.exact import stepped
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.reference import Records
from tests.ops.launches import compiled_for, tensor
from tests.support.gdn_replay import NAMES, served_block

pytestmark = pytest.mark.sglang

BF16, FP32, INT32, K, SLOTS, LAYERS = torch.bfloat16, torch.float32, torch.int32, 128, 64, 3
FLOATS = re.compile(r"F(H?ADD|MUL|FMA)\d?|MUFU|SHFL|F2F|F2FP")
PAIRS = [("Qwen3.5-27B", 16, 48, FP32), ("Qwen3.6-35B-A3B", 16, 32, BF16)]
RULE = "fused_recurrent_gated_delta_rule_packed_decode_kernel"


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    eligible = "can_use_fused_qkvzba_causal_conv1d_update_contiguous"
    monkeypatch.setattr(projections, eligible, lambda *_, **__: (True, ""))


def gates(HV: int) -> tuple[Tensor, Tensor]:
    return tensor(HV, dtype=FP32), tensor(HV, dtype=BF16)


def decode(bs: int, width: int, H: int, HV: int, state: torch.dtype) -> None:
    """As SGLang's backend: the convolution's outputs, one layer of the pool, one slot per request."""
    dim, slots = 2 * H * K + HV * K, tensor(bs, dtype=INT32)
    mixed, _, b, a = projections.fused_qkvzba_causal_conv1d_update_contiguous(
        tensor(bs, dim + HV * K, dtype=BF16), tensor(bs, 2 * HV, dtype=BF16), tensor(SLOTS, dim, 3, dtype=BF16),
        tensor(dim, 4, dtype=BF16), None, slots, qkv_dim=dim, v_dim=HV * K, num_v_heads=HV, head_v_dim=K,
        activation="silu",
    )  # fmt: skip
    out, pool = mixed.new_empty(bs, 1, HV, K), tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1]
    stepped.fused_recurrent_gated_delta_rule_packed_decode(mixed, a, b, *gates(HV), K**-0.5, pool, out, slots, True)


def verify(bs: int, width: int, H: int, HV: int, state: torch.dtype) -> None:
    sizes = [H * K, H * K, HV * K, HV, HV]
    q, k, v, a, b = tensor(bs * width, sum(sizes), dtype=BF16).split(sizes, -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, K))
    pool, slots = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1], tensor(bs, dtype=INT32)
    records = {f"replayssm_{name}": part[0] for name, part in zip(NAMES, records_of(H, HV), strict=True)}
    inputs = (q, k, v, a, b, *gates(HV), pool, slots)
    stepped.step_verify(inputs, SimpleNamespace(**records), served_block(width, tensor(bs)))


def records_of(H: int, HV: int) -> Records:
    rings = ((HV, 16, K, BF16), (H, 16, K, BF16), (HV, 16, FP32), (HV, 16, K, BF16), (H, 16, K, BF16))
    return Records(*(tensor(LAYERS, 49, *shape, dtype=dtype) for *shape, dtype in rings))  # type: ignore[misc]


def commit(bs: int, width: int, H: int, HV: int, state: torch.dtype) -> None:
    slots, counts = tensor(bs, dtype=INT32), tensor(bs, dtype=INT32)
    pool = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)
    stepped.step_commit(pool, records_of(H, HV), [gates(HV)] * LAYERS, tensor(bs), slots, [(slots, counts)], width)


# --- rows at the addresses of plain decoding's


def in_place(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The fault of views: rows of a position begin where those of the one before end, and keep their gaps."""
    return x.to(dtype)


def off_by_8_bytes(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(len(x), x[0].numel() + 16, dtype=dtype)[:, 4:-12].unflatten(1, x.shape[1:]).copy_(x)


@pytest.mark.parametrize("planted", [in_place, off_by_8_bytes])
@pytest.mark.parametrize("step", [verify, commit])
def test_a_misaligned_row_ends_the_step(
    step: Callable[..., None], planted: Callable[..., Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this check it would launch another compilation."""
    monkeypatch.setattr(stepped, "by_position", planted)
    monkeypatch.setattr(stepped, "SCRATCH_BYTES", 1)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_, **__: SimpleNamespace(hash=key))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with compiled_for(90), pytest.raises(AssertionError):
        step(3, 5, 2, 6, FP32)


# --- arithmetic, of compiled kernels


def arithmetic(compiled: Any, folder: Path) -> collections.Counter[str]:
    """Float instructions and exchanges between lanes, by kind, of the whole kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", listing)
    return collections.Counter(name for name in found if FLOATS.fullmatch(name))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("pair", "H", "HV", "state"), PAIRS)
def test_a_commit_runs_plain_decodings_arithmetic(
    pair: str, H: int, HV: int, state: torch.dtype, capability: int, tmp_path: Path
) -> None:
    found = []
    for call in (decode, commit):
        with compiled_for(capability) as launches:
            call(4, 16, H, HV, state)
        [compiled] = {launch.key: launch.compiled for launch in launches if launch.kernel == RULE}.values()
        found.append(compiled)
    layouts = [re.findall(r"#\w+ = #ttg\.\w+<.*>", each.asm["ttgir"]) for each in found]
    assert layouts[0] and layouts[0] == layouts[1]
    counts = [arithmetic(each, tmp_path) for each in found]
    assert counts[0]["FADD"] and counts[0] == counts[1]


def convolve(H: int, HV: int) -> None:
    """As plain decoding launches it, then as a verify in exact mode."""
    decode(4, 16, H, HV, FP32)
    dim, bs, width, slots = 2 * H * K + HV * K, 4, 16, tensor(4, dtype=INT32)
    columns = tensor(bs, width + 2, dim, dtype=BF16)
    windows = columns.as_strided((bs, width, dim, 3), (columns.stride(0), dim, 1, dim))
    qkvz, a, b = tensor(bs * width, dim + HV * K + 2 * HV, dtype=BF16).split([dim + HV * K, HV, HV], -1)
    states, weight = tensor(SLOTS, dim, 3, dtype=BF16), tensor(dim, 4, dtype=BF16)
    gdn_convolve(qkvz, a, b, weight, None, states, slots, windows, slots, width=width)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("pair", "H", "HV", "state"), PAIRS)
def test_a_verify_convolves_as_the_fused_decode(
    pair: str, H: int, HV: int, state: torch.dtype, capability: int, tmp_path: Path
) -> None:
    """One tile has all positions of some channels, so it has a token's operations, on more values per thread."""
    with compiled_for(capability) as launches:
        convolve(H, HV)
    operations, instructions = [], []
    convolutions = [launch.compiled for launch in launches if launch.kernel != RULE]
    for each in convolutions:
        found = re.findall(r"(arith\.(?:mul|add|div|trunc)f|math\.exp) .*: tensor<(\w+)x(\w+)>", each.asm["ttir"])
        operations.append(collections.Counter((name, dtype) for name, _, dtype in found))
        instructions.append(single_operations(arithmetic(each, tmp_path)))
    assert operations[0] and operations[1] == operations[0]
    assert convolutions[0].metadata.num_warps == 8  # of 256 values
    values = 16 * 64 // 128  # per thread
    assert instructions[0] and instructions[1] == {name: values * count for name, count in instructions[0].items()}


def single_operations(counts: collections.Counter[str]) -> dict[str, int]:
    """Count an instruction for two values twice, and an addition of a 16-bit value as any other; F2FP is left out,
    which rounds one value or two."""
    found: collections.Counter[str] = collections.Counter()
    for name, count in counts.items():
        if name != "F2FP":
            found[name.removesuffix("2").replace("FHADD", "FADD")] += count * (2 if name.endswith("2") else 1)
    return found
