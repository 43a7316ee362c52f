"""What exact mode takes for granted of SGLang's kernel as Triton compiles it, for GPUs that are not here.

A verify must launch the very kernel of plain decoding. A commit launches another compilation, with the heads of all
layers side by side, whose arithmetic must be the same, as must that of plain decoding's fused convolution and of a
verify's. A bump of SGLang or Triton fails here, not at a user. Batches differ in the compilations that a commit needs,
all of which the start must launch.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import subprocess
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from sglang.srt.mem_cache.memory_pool import MambaPool
from triton import knobs
from triton.runtime.jit import JITFunction

from sglang_dflash.drafter.config import load_config, text_config
from sglang_dflash.features.exact import stepped
from sglang_dflash.states import commit as commits
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.reference import Records
from sglang_dflash.worker.start import prewarm
from tests.ops.launches import Launch, compiled_for, tensor
from tests.support.cards import FOLDER
from tests.support.configs import serving_plan
from tests.support.gdn_replay import served_block

pytestmark = pytest.mark.sglang

BF16, BS, WIDTH, LAYERS = torch.bfloat16, 4, 16, 3
FLOATS = re.compile(r"F(H?ADD|MUL|FMA)\d?|MUFU|SHFL|F2F|F2FP")
PAIRS = ("Qwen3.5-27B", "Qwen3.6-35B-A3B")


def sizes(pair: str) -> tuple[int, int, int, int]:
    target = text_config(load_config(FOLDER / pair / "target"))
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads, value_heads, k, v = (int(target[f"linear_{name}"]) for name in names)
    return heads, value_heads, k, v


def decode(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    """As SGLang's ``TritonGDNKernel.packed_decode`` launches it."""
    stepped.fused_recurrent_gated_delta_rule_packed_decode(
        tensor(BS, 2 * H * K + HV * V, dtype=BF16), tensor(BS, HV, dtype=BF16), tensor(BS, HV, dtype=BF16),
        tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16), K**-0.5, tensor(64, HV, V, K, dtype=state),
        tensor(BS, 1, HV, V, dtype=BF16), tensor(BS, dtype=torch.int32), use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def verify(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    mixed = tensor(BS * WIDTH, 2 * H * K + HV * V, dtype=BF16)
    q, k, v = mixed.split([H * K, H * K, HV * V], -1)
    gates = (tensor(BS * WIDTH, HV, dtype=BF16) for _ in "ab")
    inputs = (
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), *gates,
        tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16), tensor(64, HV, V, K, dtype=state),
        tensor(BS, dtype=torch.int32),
    )  # fmt: skip
    stepped.step_verify(
        inputs,
        SimpleNamespace(intermediate_ssm=tensor(BS, WIDTH, HV, V, K, dtype=state)),
        *served_block(WIDTH, tensor(BS), tensor(BS)),
    )


def commit(H: int, HV: int, K: int, V: int, state: torch.dtype) -> None:
    rings = ((HV, 16, V, BF16), (H, 16, K, BF16), (HV, 16, torch.float32), (HV, 16, V, BF16), (H, 16, K, BF16))
    records = Records(*(tensor(LAYERS, 9, *shape, dtype=dtype) for *shape, dtype in rings))  # type: ignore[misc]
    stepped.step_commit(
        tensor(LAYERS, 64, HV, V, K, dtype=state), records,
        [(tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16))] * LAYERS,
        tensor(BS), tensor(BS, dtype=torch.int32), [(tensor(BS, dtype=torch.int32), tensor(BS, dtype=torch.int32))],
        WIDTH,
    )  # fmt: skip


def only_kernel(launches: list[Launch]) -> Any:
    """The compilation that all of these launches share."""
    assert len({launch.key for launch in launches}) == 1, launches
    return launches[0].compiled


def arithmetic(compiled: Any, folder: Path) -> collections.Counter[str]:
    """Float instructions and exchanges between lanes, by kind, of the whole kernel."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [knobs.nvidia.nvdisasm.path, "-c", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9_]+)", listing)
    return collections.Counter(name for name in found if FLOATS.fullmatch(name))


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize(("pair", "state"), [*zip(PAIRS, (torch.float32, BF16), strict=True)])
def test_steps_run_plain_decodings_arithmetic(pair: str, state: torch.dtype, capability: int, tmp_path: Path) -> None:
    found = {}
    for call in (decode, verify, commit):
        with compiled_for(capability) as launches:
            call(*sizes(pair), state)
        assert len(launches) == (1 if call is decode else WIDTH)
        found[call] = only_kernel(launches)
    assert found[verify].hash == found[decode].hash
    layouts = [re.findall(r"#\w+ = #ttg\.\w+<.*>", found[call].asm["ttgir"]) for call in (decode, commit)]
    assert layouts[0] and layouts[0] == layouts[1]
    counts = [arithmetic(found[call], tmp_path) for call in (decode, commit)]
    assert counts[0]["FADD"] and counts[0] == counts[1]


def convolve(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As plain decoding launches it, then as a verify in exact mode."""
    H, HV, K, V = sizes(pair)
    dim, gated = 2 * H * K + HV * V, HV * V
    slots, states, weight = tensor(BS, dtype=torch.int32), tensor(64, dim, 3, dtype=BF16), tensor(dim, 4, dtype=BF16)
    monkeypatch.setattr(
        projections, "can_use_fused_qkvzba_causal_conv1d_update_contiguous", lambda *_, **__: (True, "")
    )
    projections.fused_qkvzba_causal_conv1d_update_contiguous(
        tensor(BS, dim + gated, dtype=BF16), tensor(BS, 2 * HV, dtype=BF16), states, weight, None, slots,
        qkv_dim=dim, v_dim=gated, num_v_heads=HV, head_v_dim=V, activation="silu",
    )  # fmt: skip
    columns = tensor(BS, WIDTH + 2, dim, dtype=BF16)
    windows = columns.as_strided((BS, WIDTH, dim, 3), (columns.stride(0), dim, 1, dim))
    qkvz, a, b = tensor(BS * WIDTH, dim + gated + 2 * HV, dtype=BF16).split([dim + gated, HV, HV], -1)
    gdn_convolve(qkvz, a, b, weight, None, states, slots, windows, slots, width=WIDTH)


@pytest.mark.parametrize("capability", [90, 100])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_verify_convolves_as_the_fused_decode(
    pair: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One tile has all positions of some channels, so it has a token's operations, on more values per thread."""
    with compiled_for(capability) as launches:
        convolve(pair, monkeypatch)
    operations, instructions = [], []
    for each in (launch.compiled for launch in launches):
        found = re.findall(r"(arith\.(?:mul|add|div|trunc)f|math\.exp) .*: tensor<(\w+)x(\w+)>", each.asm["ttir"])
        operations.append(collections.Counter((name, dtype) for name, _, dtype in found))
        instructions.append(single_operations(arithmetic(each, tmp_path)))
    assert operations[0] and operations[1] == operations[0]
    assert launches[0].compiled.metadata.num_warps == 8  # of 256 values
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


def served(pair: str, state: torch.dtype) -> Any:
    """A target's runner and its pool of states, without storage, for 48 requests."""
    H, HV, K, V = sizes(pair)
    layers = text_config(load_config(FOLDER / pair / "target"))["layer_types"].count("linear_attention")
    rings = {"d": (HV, 16, V), "k": (H, 16, K), "g": (HV, 16), "rawv": (HV, 16, V), "rawk": (H, 16, K)}
    records = {
        f"replayssm_{name}": tensor(layers, 49, *shape, dtype=torch.float32 if name == "g" else BF16)
        for name, shape in rings.items()
    }
    states = tensor(layers, 64, HV, V, K, dtype=state)
    cache = object.__new__(MambaPool.SpeculativeState)
    vars(cache).update(dict.fromkeys(each.name for each in dataclasses.fields(cache)), temporal=states, **records)
    pool = SimpleNamespace(
        req_to_token=tensor(49, 64, dtype=torch.int32),
        mamba_pool=SimpleNamespace(mamba_cache=cache),
        req_index_to_mamba_index_mapping=tensor(49, dtype=torch.int32),
        get_speculative_mamba2_params_all_layers=lambda: cache,
    )
    gates = [(tensor(HV, dtype=torch.float32), tensor(HV, dtype=BF16))] * layers
    return SimpleNamespace(req_to_token_pool=pool, model=gates, max_running_requests=48, decode_cuda_graph_runner=None)


def a_step(bs: int, width: int, context: int) -> Any:
    rows, counts = tensor(bs, dtype=torch.int64), tensor(bs, dtype=torch.int32)
    batch = SimpleNamespace(req_pool_indices=rows, mamba_track_indices=rows)
    return SimpleNamespace(
        batch=batch,
        width=width,
        state=SimpleNamespace(committed_cpu=[context] * bs, in_flight=0),
        state_slots=counts,
        accepted=SimpleNamespace(accept_lens=counts, counts=[counts, counts], ends=[counts, counts]),
    )


@pytest.mark.parametrize(("pair", "state"), [*zip(PAIRS, (torch.float32, BF16), strict=True)])
def test_the_start_launches_the_commit_of_every_batch(
    pair: str, state: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_, **__: SimpleNamespace(hash=key))
    monkeypatch.setattr(stepped, "gates_of", lambda gates: gates)
    monkeypatch.setattr(commits, "scatter_mamba_states_after_mtp_verify", lambda *_: None)
    mamba = SimpleNamespace(enable_mamba_extra_buffer=True)
    monkeypatch.setattr(prewarm, "get_exec", lambda: SimpleNamespace(mamba=mamba))
    for module in (prewarm, commits):
        monkeypatch.setattr(module, "get_schedule", lambda: SimpleNamespace(page_size=1))
        monkeypatch.setattr(module, "mamba_track_grid", lambda page: 256)
    monkeypatch.setattr(prewarm, "runs_kernels", lambda tensor: True)
    for other in ("_context_kv", "_choices", "_slots", "_state_slots"):
        monkeypatch.setattr(prewarm.FirstCalls, other, lambda self: None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(synchronize=lambda: None))
    with compiled_for(90) as launches:
        target = served(pair, state)
        worker: Any = SimpleNamespace(model_runner=target)
        commit = stepped.SteppedCommit(worker, replays=True)
        inject: Any = None

        def step(bs: int, width: int, context: int) -> None:
            done = a_step(bs, width, context)
            commit.prepare(done)
            commit.advance(done)

        calls = prewarm.FirstCalls(serving_plan(), target, inject, step, commit.compiles_every_batch)
        calls.run((2,), lambda width: nullcontext())
        at_start = {launch.key for launch in launches}
        for bs in range(1, 49):
            for context in (0, 255):  # without a snapshot and with one
                step(bs, 2, context)
    late = {launch.key for launch in launches} - at_start
    assert at_start and not late, f"{len(late)} compilations under traffic, {len(at_start)} at the start"
