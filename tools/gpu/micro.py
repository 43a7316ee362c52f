"""One GDN layer of a verify and its parts at published sizes: microseconds in a CUDA graph over all layers.

``python -m tools.gpu.micro OUT DEVICE [--warm]`` writes a row per cell to the folder ``OUT``; ``--warm`` only compiles
the kernels. On ``cpu`` the cells run at tiny sizes under Triton's interpreter, without times.

A cell is an entry of :data:`CELLS`: what it launches for one layer, and the bytes that it must move. Launches go over
different layers and, with few requests, different slots, so that states do not stay in the cache; activations do, as in
a forward.
"""

from __future__ import annotations

import os
import sys

if sys.argv[2:3] == ["cpu"]:  # before Triton is imported
    os.environ["TRITON_INTERPRET"] = "1"

import contextlib
import gc
import itertools
import statistics
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import sglang.kernels.ops.attention.extend_attention as extending
import sglang.kernels.ops.attention.fla.layernorm_gated as gated
import sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent as kept
import sglang.kernels.ops.attention.triton_gdn_fused_proj as projection
import sglang.kernels.ops.mamba.causal_conv1d_triton as convolution
import torch
import triton
from torch import Tensor

from sglang_dflash.ops.kernels.attention import block_attention
from sglang_dflash.states.convolution import gdn_convolve
from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from sglang_dflash.states.reference import Records
from sglang_dflash.states.replay import windows_by_token
from tools.gpu import rows

BF16, FP32, WIDTH, ACCEPTED = torch.bfloat16, torch.float32, 16, 4
LAUNCHES = 96  # in a graph, about


class At(NamedTuple):
    """One launch: its layer, the requests' slots and rows, and the layer's activations."""

    layer: int
    slots: Tensor
    rows: Tensor
    x: SimpleNamespace


class Layers:
    """Random states, weights, records and activations of a model's layers for ``batch`` requests.

    Attributes:
        L, H, HV, K: GDN layers, key and value heads, values of a head.
        states: [layers, slots, HV, V, K] in fp32.
        conv, weight: [layers, slots, channels, 3] and [layers, channels, 4].
        windows, by_token: SGLang's overlapping view [layers, rows, steps, channels, 3], and ours of the same memory.
    """

    def __init__(self, L: int, H: int, HV: int, K: int, batch: int, device: str) -> None:
        self.L, self.H, self.HV, self.K, self.batch, self.device = L, H, HV, K, batch, device
        # as many different slots as 32 requests use
        self.repeats = max(1, min(-(-LAUNCHES // L), 32 // batch))
        S, self.values, self.channels = batch * self.repeats + 1, HV * K, (2 * H + HV) * K
        self.states = self.random(L, S, HV, K, K, dtype=FP32, scale=0.05)
        self.conv, self.weight = self.random(L, S, self.channels, 3), self.random(L, self.channels, 4)
        self.A_log, self.dt_bias, self.norm = self.random(L, HV, dtype=FP32), self.random(L, HV), self.random(K)
        self.counts = torch.full((batch,), ACCEPTED, dtype=torch.int32, device=device)
        self.starts = torch.arange(0, (batch + 1) * WIDTH, WIDTH, dtype=torch.int32, device=device)
        inputs = self.random(L, S, self.channels, WIDTH + 2)
        strides = (*inputs.stride()[:2], 1, WIDTH + 2, 1)
        self.windows = inputs.as_strided((L, S, WIDTH, self.channels, 3), strides)
        self.by_token = windows_by_token(self.windows)
        updates, keys = (L, S, HV, WIDTH, K), (L, S, H, WIDTH, K)
        decays = -self.random(*updates[:-1], dtype=FP32, scale=0.1).abs()
        lows = self.random(*updates, scale=0.01), self.random(*keys, scale=0.001)
        self.records = Records(self.random(*updates), self.random(*keys, scale=0.1), decays, *lows)
        # bytes of a request in one layer: state, records, and q, k, v, z and gates
        self.inputs = 2 * WIDTH * (self.channels + self.values + 2 * HV)
        self.state, self.recorded = self.states[0, 0].nbytes, sum(x[0, 0].nbytes for x in self.records.parts)

    def random(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 0.5) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device).normal_(0, scale)

    @cached_property
    def after_each(self) -> list[Tensor]:
        """Kept states, [requests, steps, HV, V, K] of as many layers as 4 GiB hold, at most 8."""
        shape = (self.states.shape[1], WIDTH, *self.states.shape[2:])
        most = (4 << 30) // (self.state * shape[0] * WIDTH)
        return [self.random(*shape, dtype=FP32) for _ in range(max(1, min(8, self.L, most)))]

    def launches(self) -> Iterator[At]:
        """Yield the launches of a graph."""
        sets, number = [], self.batch * WIDTH
        for _ in range(4):
            x = SimpleNamespace(qkvz=self.random(number, self.channels + self.values))
            x.ba, x.mixed = self.random(number, 2 * self.HV), x.qkvz[:, : self.channels].contiguous()
            x.b, x.a = self.random(2, number, self.HV)
            sets.append(x)
        for repeat in range(self.repeats):
            slots = torch.arange(self.batch, device=self.device, dtype=torch.int32) + repeat * self.batch
            for layer in range(self.L):
                yield At(layer, slots, slots.long(), sets[(repeat * self.L + layer) % 4])

    def qkv(self, mixed: Tensor) -> list[Tensor]:
        sizes = [self.H * self.K, self.H * self.K, self.values]
        return [part.view(len(mixed), -1, self.K) for part in torch.split(mixed, sizes, dim=-1)]


# What a cell launches for one layer.
def split_and_conv(m: Layers, at: At) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a verify reads: q, k, v; z; b and a."""
    mixed, z, b, a = projection.fused_qkvzba_split_reshape_cat_contiguous(at.x.qkvz, at.x.ba, m.H, m.HV, m.K, m.K)
    out = convolution.causal_conv1d_update(
        *(mixed.view(m.batch, -1, m.channels).transpose(1, 2), m.conv[at.layer], m.weight[at.layer], None, "silu"),
        conv_state_indices=at.slots, intermediate_conv_window=m.windows[at.layer], intermediate_state_indices=at.slots,
    )  # fmt: skip
    return out.transpose(1, 2).view(-1, m.channels), z, b, a


def convolve(m: Layers, at: At, fetches: bool = True) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what :func:`split_and_conv` returns, from one kernel, which fetches the rule's states to the L2 cache."""
    b, a = at.x.ba.chunk(2, -1)
    inputs = at.x.qkvz, a, b, m.weight[at.layer], None, m.conv[at.layer], at.slots, m.by_token[at.layer], at.rows
    mixed, z, a, b = gdn_convolve(*inputs, width=WIDTH, recurrent=m.states[at.layer] if fetches else None)
    return mixed, z, b, a


def replayed_verify(m: Layers, at: At, mixed: Tensor, a: Tensor, b: Tensor) -> Any:
    records = Records(*(part[at.layer] for part in m.records.parts))
    gates = a, b, m.A_log[at.layer], m.dt_bias[at.layer]
    return gdn_verify(
        *(*m.qkv(mixed), *gates, m.states[at.layer], at.slots, records, at.rows),
        width=WIDTH, scale=m.K**-0.5, round_beta=True,
    )  # fmt: skip


def kept_verify(m: Layers, at: At, mixed: Tensor, a: Tensor, b: Tensor) -> Any:
    q, k, v = (part[None] for part in m.qkv(mixed))
    return kept.fused_sigmoid_gating_delta_rule_update(
        A_log=m.A_log[at.layer], dt_bias=m.dt_bias[at.layer], q=q, k=k, v=v, a=a, b=b,
        initial_state_source=m.states[at.layer], initial_state_indices=at.slots, cu_seqlens=m.starts,
        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=False,
        disable_state_update=True, intermediate_states_buffer=m.after_each[at.layer % len(m.after_each)],
        intermediate_state_indices=at.slots, cache_steps=WIDTH, retrieve_parent_token=None,
    )  # fmt: skip


def norm(m: Layers, out: Tensor, z: Tensor) -> Any:
    options = {"is_rms_norm": True, "norm_before_gate": True, "activation": "swish"}
    return gated._layer_norm_fwd(out.reshape(-1, m.K), m.norm, None, 1e-6, z=z.reshape(-1, m.K), **options)


def layer(m: Layers, at: At, verify: Callable[..., Tensor], convolve: Callable[..., Any] = split_and_conv) -> Any:
    mixed, z, b, a = convolve(m, at)
    return norm(m, verify(m, at, mixed, a, b), z)


class Contexts:
    """K/V of several layers at random slots, and a block's queries after ``context`` tokens of ``batch`` requests."""

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        dim: int,
        causal: bool,
        stored: torch.dtype,
        context: int,
        batch: int,
        device: str,
    ) -> None:
        number = batch * (context + WIDTH)
        self.causal, self.scale, self.batch = causal, dim**-0.5, batch
        self.L = max(2, min(8, (4 << 30) // (4 * number * kv_heads * dim)))  # a cache holds none of them
        shape = self.L, 2, number + 1, kv_heads, dim
        self.kv = torch.empty(shape, dtype=BF16, device=device).normal_().to(stored)
        self.q = torch.empty(batch * WIDTH, heads, dim, dtype=BF16, device=device).normal_()
        self.table = 1 + torch.randperm(number, device=device, dtype=torch.int32).view(batch, -1)
        self.rows = torch.arange(batch, device=device)
        self.lengths = torch.full((batch,), context, device=device)
        starts, slots = torch.arange(batch + 1, device=device), self.table[:, :context].reshape(-1).long()
        self.plan = starts * WIDTH, (starts * context).int(), slots  # of SGLang's kernel
        self.bytes = 2 * stored.itemsize * (context + WIDTH) * kv_heads * dim + 4 * WIDTH * heads * dim

    def launches(self) -> Iterator[At]:
        return (At(layer, self.rows, self.rows, SimpleNamespace()) for layer in range(self.L))


def attend(m: Contexts, at: At) -> Tensor:
    context = m.table, m.rows, m.lengths
    return block_attention(m.q, *m.kv[at.layer], *context, scale=m.scale, causal=m.causal)


def extend(m: Contexts, at: At) -> Tensor:
    keys, values = m.kv[at.layer]
    block = keys[: len(m.q)], values[: len(m.q)], torch.empty_like(m.q)
    extending.extend_attention_fwd(m.q, *block, keys, values, *m.plan, None, m.causal, None, WIDTH, 1.0, 1.0, m.scale)
    return block[-1]


class Cell(NamedTuple):
    """Launches of one layer, or one launch ``of_all`` layers; bytes per request and layer that they must move."""

    launch: Callable[[Any, At], Any]
    floor: Callable[[Any], float]
    of_all: bool = False


def alone(verify: Callable[..., Any]) -> Callable[[Layers, At], Any]:
    return lambda m, at: verify(m, at, at.x.mixed, at.x.a, at.x.b)


CELLS = {
    "layer, kept (SGLang)": Cell(lambda m, at: layer(m, at, kept_verify), lambda m: 17 * m.state + 2 * m.inputs),
    "layer, replayed": Cell(
        lambda m, at: layer(m, at, replayed_verify, convolve), lambda m: m.state + m.recorded + 2 * m.inputs
    ),
    "layer, replayed, states not fetched early": Cell(
        lambda m, at: layer(m, at, replayed_verify, partial(convolve, fetches=False)),
        lambda m: m.state + m.recorded + 2 * m.inputs,
    ),
    "gdn_convolve": Cell(convolve, lambda m: 2 * m.inputs + 2 * (WIDTH + 2) * m.channels),
    "split and conv (SGLang)": Cell(split_and_conv, lambda m: 2 * m.inputs + 2 * (WIDTH + 2) * m.channels),
    "kept verify (SGLang)": Cell(alone(kept_verify), lambda m: 17 * m.state + m.inputs),
    "gdn_verify": Cell(alone(replayed_verify), lambda m: m.state + m.recorded + m.inputs),
    "gdn_commit": Cell(
        lambda m, at: gdn_commit(m.states, m.records, at.rows, at.slots, m.counts),
        lambda m: 2 * m.state + m.recorded * ACCEPTED / WIDTH,
        of_all=True,
    ),
}
MODELS, BATCHES = {"4B": (24, 16, 32, 128), "27B": (48, 16, 48, 128)}, (1, 8, 16, 32, 64)
SMALL = {"small": (2, 2, 4, 32)}
ATTENTION = {
    "block_attention": Cell(attend, lambda m: m.bytes),
    "extend attention (SGLang, Triton)": Cell(extend, lambda m: m.bytes),
}
# query heads, key heads, head dimension, causal, dtype of K and V
SHAPES = {
    "drafter 32/8x128": (32, 8, 128, False, BF16),
    "drafter 32/8x128, FP8": (32, 8, 128, False, torch.float8_e4m3fn),
    "verify 16/4x256": (16, 4, 256, True, BF16),
}
CONTEXTS = (250, 4096, 16384)


def models(real: bool, warm: bool) -> Iterator[tuple[str, Layers | Contexts, dict[str, Cell]]]:
    device = "cuda" if real else "cpu"
    for (sizes, model), batch in itertools.product((MODELS if real else SMALL).items(), BATCHES[: 1 if warm else None]):
        yield sizes, Layers(*model, batch if real else 2, device), CELLS
        if not real:
            break
    shapes, contexts = (
        (SHAPES, CONTEXTS[: 1 if warm else None]) if real else ({"small": (2, 1, 16, False, BF16)}, (40,))
    )
    for (sizes, shape), context, batch in itertools.product(shapes.items(), contexts, (1, 8, 16) if real else (2,)):
        cells = ATTENTION if BF16 in shape else {"block_attention": ATTENTION["block_attention"]}
        yield f"{sizes}, {context} tokens", Contexts(*shape, context, batch, device), cells


def microseconds(cell: Cell, m: Layers | Contexts, timed: bool) -> float:
    """Return the time per layer: of the median replay of a CUDA graph; 0 after one launch unless ``timed``."""
    calls = [at for at in m.launches() if at.layer == 0 or not cell.of_all]
    if not timed:
        cell.launch(m, calls[0])
        return 0.0
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        cell.launch(m, calls[0])
        side.synchronize()
        with torch.cuda.graph(graph, stream=side):
            for at in calls:
                cell.launch(m, at)
        graph.replay()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(15)]
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        side.synchronize()
    milliseconds = statistics.median(start.elapsed_time(end) for start, end in marks)
    return round(1000 * milliseconds / len(calls) / (m.L if cell.of_all else 1), 2)


def main(out: Path, device: str, warm: bool) -> None:
    real = device == "cuda"
    # rows per program as on 132 multiprocessors; it asks the server's context otherwise
    gated.calc_rows_per_block = lambda number, device: min(4, triton.next_power_of_2(triton.cdiv(number, 264)))
    gated.device_context = lambda device: contextlib.nullcontext()
    if not real:
        from tests.rehearsal import interpreter

        interpreter.install()
        for module in (convolution, kept, gated):
            module.is_arch_support_pdl = lambda: False
    gc.freeze()  # each capture collects garbage
    rate = rows.rate_of(torch.cuda.get_device_name() if real else "")
    for sizes, m, cells in models(real, warm):
        for name, cell in cells.items():
            row = {"what": "micro", "item": name, "sizes": sizes, "batch": m.batch}
            try:
                row["us"] = microseconds(cell, m, timed=real and not warm)
                row["floor_us"] = round(cell.floor(m) * m.batch / rate / 1e6, 2)
            except Exception as error:  # noqa: BLE001 - another cell may work
                row["error"] = f"{type(error).__name__}: {error}"[-1500:]
            if not warm or "error" in row:
                rows.append(out, **row)
            assert "CUDA error" not in str(row.get("error")), row


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--warm" in sys.argv)
