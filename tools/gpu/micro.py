"""One GDN layer of a verify and its parts at published sizes: microseconds in a CUDA graph over all layers.

``python -m tools.gpu.micro OUT DEVICE [--warm]`` writes a row per cell to the folder ``OUT``; ``--warm`` only compiles the
kernels. On ``cpu`` the cells run at tiny sizes under Triton's interpreter, without times.

A cell is a line of :data:`CELLS`: what it launches for one layer, and the bytes that it must move. Launches go over
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
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import sglang.kernels.ops.attention.fla.fused_recurrent as recurrent
import sglang.kernels.ops.attention.fla.layernorm_gated as gated
import sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent as kept
import sglang.kernels.ops.attention.triton_gdn_fused_proj as projection
import sglang.kernels.ops.mamba.causal_conv1d_triton as convolution
import torch
import triton
from torch import Tensor

from sglang_dflash.states.kernels import gdn_commit, gdn_verify
from sglang_dflash.states.reference import Records
from tools.gpu import rows

BF16, WIDTH, ACCEPTED = torch.bfloat16, 16, 4
LAUNCHES = 96  # in a graph, about


@dataclass(frozen=True)
class Model:
    """Sizes of a target: GDN layers, key and value heads, values per head."""

    name: str
    layers: int
    H: int
    HV: int
    K: int = 128


@dataclass(frozen=True)
class At:
    """One launch: its layer, the requests' slots and rows, and the activations of the layer."""

    layer: int
    slots: Tensor
    rows: Tensor
    x: SimpleNamespace


class Layers:
    """Random states, weights, records and activations of all layers of a model for ``batch`` requests.

    Attributes:
        states: [layers, slots, HV, V, K] in fp32.
        conv, weight: [layers, slots, channels, 3] and [layers, channels, 4].
        windows: SGLang's overlapping view [layers, rows, steps, channels, 3].
    """

    def __init__(self, model: Model, batch: int, device: str) -> None:
        self.model, self.batch, self.device = model, batch, device
        self.H, self.HV, self.K, self.L = model.H, model.HV, model.K, model.layers
        # as many different slots as 32 requests use
        self.repeats = max(1, min(-(-LAUNCHES // self.L), 32 // batch))
        self.slots = batch * self.repeats + 1
        self.values, self.channels = self.HV * self.K, (2 * self.H + self.HV) * self.K
        self.states = self.random(self.L, self.slots, self.HV, self.K, self.K, dtype=torch.float32, scale=0.05)
        self.conv, self.weight = (
            self.random(self.L, self.slots, self.channels, 3),
            self.random(self.L, self.channels, 4),
        )
        self.A_log, self.dt_bias = self.random(self.L, self.HV, dtype=torch.float32), self.random(self.L, self.HV)
        self.norm = self.random(self.K)
        self.starts = torch.arange(0, (batch + 1) * WIDTH, WIDTH, dtype=torch.int32, device=device)
        inputs = torch.zeros(self.L, self.slots, self.channels, WIDTH + 2, dtype=BF16, device=device)
        shape, strides = (self.L, self.slots, WIDTH, self.channels, 3), (*inputs.stride()[:2], 1, WIDTH + 2, 1)
        self.windows = inputs.as_strided(shape, strides)
        updates, keys = (self.L, self.slots, self.HV, WIDTH, self.K), (self.L, self.slots, self.H, WIDTH, self.K)
        decays = -self.random(*updates[:-1], dtype=torch.float32, scale=0.1).abs()
        lows = self.random(*updates, scale=0.01), self.random(*keys, scale=0.001)
        self.records = Records(self.random(*updates), self.random(*keys, scale=0.1), decays, *lows)

    def random(self, *shape: int, dtype: torch.dtype = BF16, scale: float = 0.5) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device).normal_(0, scale)

    @cached_property
    def after_each(self) -> list[Tensor]:
        """Kept states, [requests, steps, HV, V, K] of as many layers as 4 GiB hold, at most 8."""
        size = self.states[0, 0].nbytes * self.slots * WIDTH
        shape = (self.slots, WIDTH, self.HV, self.K, self.K)
        return [self.random(*shape, dtype=torch.float32) for _ in range(max(1, min(8, self.L, (4 << 30) // size)))]

    def launches(self, tokens: int) -> Iterator[At]:
        """Yield the launches of a graph, for ``tokens`` per request."""
        sets, number = [], self.batch * tokens
        for _ in range(4):
            x = SimpleNamespace(qkvz=self.random(number, self.channels + self.values))
            x.ba, x.out = self.random(number, 2 * self.HV), self.random(number, self.HV, self.K)
            x.mixed, x.z = x.qkvz[:, : self.channels].contiguous(), self.random(number, self.HV, self.K)
            x.b, x.a = (half.contiguous() for half in x.ba.chunk(2, dim=-1))
            sets.append(x)
        for repeat in range(self.repeats):
            slots = torch.arange(self.batch, device=self.device, dtype=torch.int32) + repeat * self.batch
            for layer in range(self.L):
                yield At(layer, slots, slots.long(), sets[(repeat * self.L + layer) % 4])

    def qkv(self, mixed: Tensor) -> list[Tensor]:
        sizes = [self.H * self.K, self.H * self.K, self.values]
        return [part.view(len(mixed), -1, self.K) for part in torch.split(mixed, sizes, dim=-1)]

    @property
    def state(self) -> int:
        """Bytes of a request's state in one layer."""
        return self.states[0, 0].nbytes

    @property
    def recorded(self) -> int:
        """Bytes of a request's records in one layer."""
        return sum(part[0, 0].nbytes for part in self.records.parts)

    def activations(self, tokens: int = WIDTH) -> int:
        """Bytes of a request's q, k, v, z and gates in one layer."""
        return 2 * tokens * (self.channels + self.values + 2 * self.HV)


# What a cell launches for one layer.
def split(m: Layers, at: At) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    found: tuple[Tensor, Tensor, Tensor, Tensor] = projection.fused_qkvzba_split_reshape_cat_contiguous(
        at.x.qkvz, at.x.ba, m.H, m.HV, m.K, m.K
    )
    return found


def conv(m: Layers, at: At, mixed: Tensor) -> Tensor:
    out: Tensor = convolution.causal_conv1d_update(
        *(mixed.view(m.batch, -1, m.channels).transpose(1, 2), m.conv[at.layer], m.weight[at.layer], None, "silu"),
        conv_state_indices=at.slots, intermediate_conv_window=m.windows[at.layer], intermediate_state_indices=at.slots,
    )  # fmt: skip
    return out.transpose(1, 2).view(-1, m.channels)


def split_and_conv(m: Layers, at: At) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return what a verify reads: q, k, v; z; b and a."""
    mixed, z, b, a = split(m, at)
    return conv(m, at, mixed), z, b, a


def replayed_verify(m: Layers, at: At, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    records = Records(*(part[at.layer] for part in m.records.parts))
    found: Tensor = gdn_verify(
        *(*m.qkv(mixed), a, b, m.A_log[at.layer], m.dt_bias[at.layer], m.states[at.layer], at.slots, records, at.rows),
        width=WIDTH, scale=m.K**-0.5, round_beta=True,
    )  # fmt: skip
    return found


def kept_verify(m: Layers, at: At, mixed: Tensor, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (part[None] for part in m.qkv(mixed))
    found: Tensor = kept.fused_sigmoid_gating_delta_rule_update(
        A_log=m.A_log[at.layer], dt_bias=m.dt_bias[at.layer], q=q, k=k, v=v, a=a, b=b,
        initial_state_source=m.states[at.layer], initial_state_indices=at.slots, cu_seqlens=m.starts,
        use_qk_l2norm_in_kernel=True, softplus_beta=1.0, softplus_threshold=20.0, is_kda=False,
        disable_state_update=True, intermediate_states_buffer=m.after_each[at.layer % len(m.after_each)],
        intermediate_state_indices=at.slots, cache_steps=WIDTH, retrieve_parent_token=None,
    )  # fmt: skip
    return found


def norm(m: Layers, out: Tensor, z: Tensor) -> Any:
    rows_of = (part.reshape(-1, m.K) for part in (out, z))
    return gated._layer_norm_fwd(
        next(rows_of), m.norm, None, 1e-6, z=next(rows_of), is_rms_norm=True, norm_before_gate=True, activation="swish"
    )


def layer(m: Layers, at: At, verify: Callable[..., Tensor]) -> Any:
    mixed, z, b, a = split_and_conv(m, at)
    return norm(m, verify(m, at, mixed, a, b), z)


def decode(m: Layers, at: At) -> Any:
    mixed, z, b, a = projection.fused_qkvzba_causal_conv1d_update_contiguous(
        at.x.qkvz, at.x.ba, m.conv[at.layer], m.weight[at.layer], None, at.slots, qkv_dim=m.channels, v_dim=m.values,
        num_v_heads=m.HV, head_v_dim=m.K, activation="silu",
    )  # fmt: skip
    out = mixed.new_empty(len(mixed), 1, m.HV, m.K)
    recurrent.fused_recurrent_gated_delta_rule_packed_decode(
        mixed_qkv=mixed, a=a, b=b, A_log=m.A_log[at.layer], dt_bias=m.dt_bias[at.layer], scale=m.K**-0.5,
        initial_state=m.states[at.layer], out=out, ssm_state_indices=at.slots, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return norm(m, out, z)


def commit(m: Layers, at: At) -> None:
    counts = torch.full_like(at.slots, ACCEPTED)
    gdn_commit(m.states, m.records, at.rows, at.slots, counts)


@dataclass(frozen=True)
class Cell:
    """Launches of one layer, and bytes per request and layer that they must move.

    Attributes:
        tokens: per request.
        of_all: one launch serves all layers.
        needs_cuda: SGLang's wrapper refuses tensors of a CPU.
    """

    launch: Callable[[Layers, At], Any]
    floor: Callable[[Layers], float]
    tokens: int = WIDTH
    of_all: bool = False
    needs_cuda: bool = False


CELLS = {
    "layer, kept (SGLang)": Cell(lambda m, at: layer(m, at, kept_verify), lambda m: 17 * m.state + 2 * m.activations()),
    "layer, replayed": Cell(
        lambda m, at: layer(m, at, replayed_verify), lambda m: m.state + m.recorded + 2 * m.activations()
    ),
    "layer, plain decoding": Cell(decode, lambda m: 2 * m.state + 2 * m.activations(1), tokens=1, needs_cuda=True),
    "split and conv": Cell(split_and_conv, lambda m: 2 * m.activations() + 2 * (WIDTH + 2) * m.channels),
    "kept verify (SGLang)": Cell(
        lambda m, at: kept_verify(m, at, at.x.mixed, at.x.a, at.x.b), lambda m: 17 * m.state + m.activations()
    ),
    "gdn_verify": Cell(
        lambda m, at: replayed_verify(m, at, at.x.mixed, at.x.a, at.x.b),
        lambda m: m.state + m.recorded + m.activations(),
    ),
    "gdn_commit": Cell(commit, lambda m: 2 * m.state + m.recorded * ACCEPTED / WIDTH, of_all=True),
    "gated norm": Cell(lambda m, at: norm(m, at.x.out, at.x.z), lambda m: 6 * WIDTH * m.values),
}
MODELS, BATCHES = (Model("4B", 24, 16, 32), Model("27B", 48, 16, 48)), (1, 8, 16, 32)
SMALL_MODELS, SMALL_BATCHES = (Model("small", 2, 2, 4, K=32),), (2,)


def calls_of(cell: Cell, m: Layers) -> tuple[list[Callable[[], Any]], int]:
    """Return the launches of a graph, and of how many layers each is."""
    launches = list(m.launches(cell.tokens))
    if cell.of_all:
        launches = [at for at in launches if at.layer == 0]
    return [lambda at=at: cell.launch(m, at) for at in launches], m.L if cell.of_all else 1  # type: ignore[misc]


def seconds_of(calls: list[Callable[[], Any]]) -> float:
    """Return the seconds of all calls in a row: the median replay of their CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls[0]()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            for call in calls:
                call()
        graph.replay()
        marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(15)]
        for start, end in marks:
            start.record()
            graph.replay()
            end.record()
        side.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in marks) / 1000


def main(out: Path, device: str, warm: bool) -> None:
    real = device == "cuda"
    prepare(real)
    models, batches = (MODELS, BATCHES) if real else (SMALL_MODELS, SMALL_BATCHES)
    rate = rows.rate_of(torch.cuda.get_device_name() if real else "CPU") * 1e12
    for model in models:
        for batch in batches[:1] if warm else batches:
            m = Layers(model, batch, device)
            for name, cell in CELLS.items():
                row = {"what": "micro", "item": name, "sizes": model.name, "batch": batch}
                try:
                    calls, layers = calls_of(cell, m)
                    if warm or not real:
                        with on_card() if cell.needs_cuda and not real else contextlib.nullcontext():
                            calls[0]()
                        measured = {"us": 0.0}
                    else:
                        measured = {"us": round(seconds_of(calls) / len(calls) / layers * 1e6, 2)}
                    measured["floor_us"] = round(cell.floor(m) * batch / rate * 1e6, 2)
                except Exception as error:  # noqa: BLE001 - another cell may work
                    rows.append(out, **row, error=f"{type(error).__name__}: {error}"[-1500:])
                    if "CUDA error" in str(error):
                        sys.exit("the device is lost")
                    continue
                if not warm:
                    rows.append(out, **row, **measured)
                    print(row, measured, flush=True)
            del m, calls
            gc.collect()


def prepare(real: bool) -> None:
    """Give SGLang's wrappers what its server would, and on a CPU what a device would."""
    # rows per program as on 132 multiprocessors; it asks the server's context otherwise
    gated.calc_rows_per_block = lambda number, device: min(4, triton.next_power_of_2(triton.cdiv(number, 264)))
    gated.device_context = lambda device: contextlib.nullcontext()
    if not real:
        from tests.rehearsal import interpreter

        interpreter.install()
        for module in (convolution, kept, gated):
            module.is_arch_support_pdl = lambda: False


@contextlib.contextmanager
def on_card() -> Iterator[None]:
    """Let tensors of a CPU say that they are a GPU's."""
    from torch.overrides import TorchFunctionMode

    class OnCard(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_cuda = getattr(function, "__self__", None) is Tensor.is_cuda
            return True if is_cuda else function(*args, **(kwargs or {}))

    with OnCard():
        yield


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], "--warm" in sys.argv)
