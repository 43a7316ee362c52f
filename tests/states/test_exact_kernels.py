"""What exact mode requires of SGLang's kernels as Triton compiles them, for GPUs that are not here.

A verify must launch the very compilation of plain decoding, at any batch, width, padding and rank: Triton compiles by
the divisibility of addresses and integers by 16, and a row that begins 8 bytes off changes the state's bits. A commit
launches another one, with the heads of all layers side by side, whose arithmetic must be the same, as must that of
plain decoding's fused convolution and of a verify's. A bump of SGLang or Triton fails here, not at a user. Batches
differ in the compilations that a commit needs, all of which the start must launch.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("sglang")

from sglang.kernels.ops.attention import triton_gdn_fused_proj as projections
from sglang.srt.mem_cache.memory_pool import MambaPool
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction

from sglang_dflash.drafter.formats import text_config
from sglang_dflash.features.exact import stepped
from sglang_dflash.states import commit as commits
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.reference import Records
from tests.ops.launches import Launch, compiled_for, first_calls, tensor
from tests.support.cards import FOLDER
from tests.support.files import load_config
from tests.support.gdn_replay import NAMES, served_block

pytestmark = pytest.mark.sglang

BF16, FP32, INT32, K, SLOTS, LAYERS = torch.bfloat16, torch.float32, torch.int32, 128, 64, 3
BATCHES, WIDTHS = (1, 3, 48), (2, 5, 16)
FLOATS = re.compile(r"F(H?ADD|MUL|FMA)\d?|MUFU|SHFL|F2F|F2FP")
# Key and value heads of a rank: 4B, 35B-A3B and Coder-Next; the 27Bs, where a rank of 8 has rows of 8 mod 16 bytes.
HEADS = [(16 // tp, heads // tp) for heads, ranks in ((32, (1, 16)), (48, (1, 2, 4, 8, 16))) for tp in ranks]
RANKS = [(*heads, dtype) for heads, dtype in zip(HEADS, itertools.cycle((FP32, BF16)), strict=False)]
PAIRS = [("Qwen3.5-27B", 16, 48, FP32), ("Qwen3.6-35B-A3B", 16, 32, BF16)]
RULE = "fused_recurrent_gated_delta_rule_packed_decode_kernel"


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    eligible = "can_use_fused_qkvzba_causal_conv1d_update_contiguous"
    monkeypatch.setattr(projections, eligible, lambda *_, **__: (True, ""))


def gates(HV: int) -> tuple[Tensor, Tensor]:
    return tensor(HV, dtype=FP32), tensor(HV, dtype=BF16)


def decode(bs: int, width: int, H: int, HV: int, state: torch.dtype, varied: bool = False) -> None:
    """As SGLang's backend: the convolution's outputs, one layer of the pool, one slot per request."""
    dim, slots = 2 * H * K + HV * K, tensor(bs, dtype=INT32)
    mixed, _, b, a = projections.fused_qkvzba_causal_conv1d_update_contiguous(
        tensor(bs, dim + HV * K, dtype=BF16), tensor(bs, 2 * HV, dtype=BF16), tensor(SLOTS, dim, 3, dtype=BF16),
        tensor(dim, 4, dtype=BF16), None, slots, qkv_dim=dim, v_dim=HV * K, num_v_heads=HV, head_v_dim=K,
        activation="silu",
    )  # fmt: skip
    out, pool = mixed.new_empty(bs, 1, HV, K), tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1]
    stepped.fused_recurrent_gated_delta_rule_packed_decode(mixed, a, b, *gates(HV), K**-0.5, pool, out, slots, True)


def verify(bs: int, width: int, H: int, HV: int, state: torch.dtype, varied: bool = False) -> None:
    """``varied``: with rows of a longer projection that begin one number off, as no kernel may receive them."""
    sizes = [H * K, H * K, HV * K, HV, HV]
    rows = tensor(bs * width, sum(sizes) + varied, dtype=BF16)[:, int(varied) :]
    q, k, v, a, b = rows.split(sizes, -1)
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, K))
    pool, slots = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)[1], tensor(bs, dtype=INT32, skipped=int(varied))
    records = {f"replayssm_{name}": part[0] for name, part in zip(NAMES, records_of(H, HV), strict=True)}
    inputs = (q, k, v, a, b, *gates(HV), pool, slots)
    stepped.step_verify(inputs, SimpleNamespace(**records), served_block(width, tensor(bs)))


def records_of(H: int, HV: int, layers: int = LAYERS) -> Records:
    rings = ((HV, 16, K, BF16), (H, 16, K, BF16), (HV, 16, FP32), (HV, 16, K, BF16), (H, 16, K, BF16))
    return Records(*(tensor(layers, 49, *shape, dtype=dtype) for *shape, dtype in rings))  # type: ignore[misc]


def commit(bs: int, width: int, H: int, HV: int, state: torch.dtype, varied: bool = False) -> None:
    """``varied``: with tracked states."""
    slots, counts = tensor(bs, dtype=INT32), tensor(bs, dtype=INT32)
    targets = [(slots, counts), (tensor(bs), counts)] if varied else [(slots, counts)]
    pool = tensor(LAYERS, SLOTS, HV, K, K, dtype=state)
    stepped.step_commit(pool, records_of(H, HV), [gates(HV)] * LAYERS, tensor(bs), slots, targets, width)


# --- specialisations, by Triton's keys: nothing is compiled


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches with the compilation that each would have: ``hash``, and ``runtime`` without constants."""

    def specialised(
        self: Any, key: str, signature: dict[str, str], device: Any, constants: Any, options: Any, attrs: Any, _: bool
    ) -> Any:
        names = list(signature)
        divisible = {names[index] for (index, *_), found in attrs.items() if found}
        types = tuple((name, kind, name in divisible) for name, kind in signature.items() if kind != "constexpr")
        return SimpleNamespace(hash=(self.fn.__name__, key), runtime=(self.fn.__name__, *types))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "_do_compile", specialised)
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.cuda, "current_device", lambda: 0)
        with compiled_for(90) as launches:
            yield launches


def specialisations(call: Callable[..., None], heads: Any, patch: pytest.MonkeyPatch) -> tuple[set[Any], set[Any]]:
    """Of the rule's kernel, at every batch and width, as a rank launches it: with constants, and without."""
    with recorded(patch) as launches:
        for bs, width, varied in itertools.product(BATCHES, WIDTHS, (False, True)):
            call(bs, width, *heads, varied)
    found = [launch.compiled for launch in launches if launch.kernel == RULE]
    return {each.hash for each in found}, {each.runtime for each in found}


@pytest.mark.parametrize("heads", RANKS)
def test_a_step_specialises_as_plain_decoding(heads: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verify launches its very compilation; a commit's, of one layer or of all, has other constants."""
    whole, runtime = specialisations(decode, heads, monkeypatch)
    assert len(whole) == len(runtime) == 1
    assert specialisations(verify, heads, monkeypatch)[0] == whole
    for scratch in (1, stepped.SCRATCH_BYTES):
        monkeypatch.setattr(stepped, "SCRATCH_BYTES", scratch)
        assert specialisations(commit, heads, monkeypatch)[1] == runtime


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
    with recorded(monkeypatch), pytest.raises(AssertionError):
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


def served(pair: str, H: int, HV: int, state: torch.dtype) -> Any:
    """A target's runner and its pool of states, without storage, for 48 requests."""
    layers = text_config(load_config(FOLDER / pair / "target"))["layer_types"].count("linear_attention")
    records = {f"replayssm_{name}": part for name, part in zip(NAMES, records_of(H, HV, layers), strict=True)}
    states = tensor(layers, SLOTS, HV, K, K, dtype=state)
    cache = object.__new__(MambaPool.SpeculativeState)
    vars(cache).update(dict.fromkeys(each.name for each in dataclasses.fields(cache)), temporal=states, **records)
    pool = SimpleNamespace(
        req_to_token=tensor(49, 64, dtype=torch.int32),
        mamba_pool=SimpleNamespace(mamba_cache=cache),
        req_index_to_mamba_index_mapping=tensor(49, dtype=torch.int32),
        get_speculative_mamba2_params_all_layers=lambda: cache,
    )
    return SimpleNamespace(
        req_to_token_pool=pool, model=[gates(HV)] * layers, max_running_requests=48, decode_cuda_graph_runner=None
    )


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


@pytest.mark.parametrize(("pair", "H", "HV", "state"), PAIRS)
def test_the_start_launches_the_commit_of_every_batch(
    pair: str, H: int, HV: int, state: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JITFunction, "_do_compile", lambda self, key, *_, **__: SimpleNamespace(hash=key))
    monkeypatch.setattr(stepped, "gates_of", lambda gates: gates)
    monkeypatch.setattr(commits, "scatter_mamba_states_after_mtp_verify", lambda *_: None)
    monkeypatch.setattr(commits, "get_schedule", lambda: SimpleNamespace(page_size=1))
    monkeypatch.setattr(commits, "mamba_track_grid", lambda page: 256)
    with compiled_for(90) as launches:
        target = served(pair, H, HV, state)
        worker: Any = SimpleNamespace(model_runner=target)
        commit = stepped.SteppedCommit(worker)

        def step(bs: int, width: int, context: int = 0, sampled: bool = False) -> None:
            done = a_step(bs, width, context)
            commit.prepare(done)
            commit.advance(done)

        first_calls(target, step, monkeypatch, every_batch=commit.compiles_every_batch)
        at_start = {launch.key for launch in launches}
        for bs in range(1, 49):
            for context in (0, 255):  # without a snapshot and with one
                step(bs, 16, context)
    late = {launch.key for launch in launches} - at_start
    assert at_start and not late, f"{len(late)} compilations under traffic, {len(at_start)} at the start"
