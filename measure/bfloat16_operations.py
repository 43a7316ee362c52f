"""Which operations of a target give other bits for a block than for its tokens one by one: bfloat16, on this machine.

python -m measure.bfloat16_operations

Eight requests as plain decoding computes them, 16 steps of a row each, and as a verify does, 16 rows of each at once:
the tiny targets' own weights and sizes, random activations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from safetensors.torch import load_file
from torch import Tensor

from sglang_dflash.bench.provenance import describe_hardware, hardware
from sglang_dflash.bench.tables import Table
from sglang_dflash.cpu.layers import conv, gdn
from sglang_dflash.cpu.layers.attention_math import Contexts, attend, attend_blocks, block_keys, decode_keys
from sglang_dflash.pairs import NAMES, target_path

REQUESTS, STEPS = 8, 16

# Results of plain decoding and of a verify, each [requests * steps, ...], of one operation.
Both = tuple[Tensor, Tensor]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def rows(step: int) -> slice:
    """The rows of all requests at ``step``, in tensors that are request-major."""
    return slice(step, None, STEPS)


def by_step(results: list[Tensor]) -> Tensor:
    """Results of successive steps, ``[requests, ...]`` each, as the rows of a verify."""
    return torch.stack(results, 1).flatten(0, 1)


def product(weight: Tensor) -> Both:
    """A linear layer, the LM head, or an expert that all tokens go to: ``weight [O, I]``."""
    x = normal(REQUESTS * STEPS, weight.shape[1])
    return by_step([F.linear(x[rows(step)], weight) for step in range(STEPS)]), F.linear(x, weight)


def attention(config: dict[str, Any], lengths: list[int]) -> Both:
    """Softmax attention over contexts of these lengths."""
    heads, kv_heads, dim = (config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    lens, reach = torch.tensor(lengths), max(lengths) + STEPS
    table = torch.arange(REQUESTS * reach, dtype=torch.int32).view(REQUESTS, reach)
    k, v = (normal(table.numel(), kv_heads, dim) for _ in range(2))
    q = normal(REQUESTS * STEPS, heads, dim)
    requests, scale = torch.arange(REQUESTS), dim**-0.5
    steps = []
    for step in range(STEPS):
        keys = decode_keys(Contexts(table, requests, lens + step + 1), window=None)
        steps.append(attend(q[rows(step)], k, v, keys, batch=REQUESTS, scale=scale))
    slots = table.gather(1, lens.unsqueeze(1) + torch.arange(STEPS))
    blocks = block_keys(Contexts(table, requests, lens), slots, causal=True, window=None)
    return by_step(steps), attend_blocks(q, k, v, blocks, batch=REQUESTS, scale=scale)


def convolution(config: dict[str, Any]) -> Both:
    dim, width = _mixed_width(config), config["linear_conv_kernel_dim"]
    weight, state, x, slots = normal(dim, width), normal(REQUESTS + 1, dim, width - 1), normal(128, dim), _slots()
    windows = normal(REQUESTS, dim, STEPS + width - 2).unfold(-1, width - 1, 1).transpose(1, 2)
    block = conv.update(
        x.view(REQUESTS, STEPS, dim).transpose(1, 2), state, weight, activation="silu", conv_state_indices=slots,
        intermediate_conv_window=windows, intermediate_state_indices=torch.arange(REQUESTS),
    )  # fmt: skip
    steps = [
        conv.update(x[rows(step)], state, weight, activation="silu", conv_state_indices=slots) for step in range(STEPS)
    ]
    return by_step(steps), block.transpose(1, 2).flatten(0, 1)


def gated_delta_rule(config: dict[str, Any]) -> Both:
    heads, value_heads, k, v = _gdn_sizes(config)
    a, b, mixed = (normal(REQUESTS * STEPS, n) for n in (value_heads, value_heads, _mixed_width(config)))
    A_log, dt_bias = torch.rand(value_heads).log(), torch.randn(value_heads)
    state, slots = torch.randn(REQUESTS + 1, value_heads, v, k), _slots()
    queries, keys, values = (
        x.reshape(1, len(mixed), -1, size)
        for x, size in zip(mixed.split([heads * k, heads * k, value_heads * v], -1), (k, k, v), strict=True)
    )
    block = gdn.verify(
        A_log, a, dt_bias, 1.0, 20.0, queries, keys, values, b, state, slots,
        use_qk_l2norm_in_kernel=True, cu_seqlens=torch.arange(REQUESTS + 1) * STEPS, disable_state_update=True,
        intermediate_states_buffer=torch.empty(REQUESTS, STEPS, value_heads, v, k),
        intermediate_state_indices=torch.arange(REQUESTS),
    )  # fmt: skip
    steps = []
    for step in range(STEPS):
        out, own = mixed.new_empty(REQUESTS, 1, value_heads, v), rows(step)
        gdn.decode(mixed[own], a[own], b[own], A_log, dt_bias, k**-0.5, state, out, slots, True)
        steps.append(out[:, 0])
    return by_step(steps), block[0]


def _gdn_sizes(config: dict[str, Any]) -> tuple[int, int, int, int]:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    heads, value_heads, k, v = (int(config[f"linear_{name}"]) for name in names)
    return heads, value_heads, k, v


def _mixed_width(config: dict[str, Any]) -> int:
    heads, value_heads, k, v = _gdn_sizes(config)
    return 2 * heads * k + value_heads * v


def _slots() -> Tensor:
    return torch.arange(REQUESTS) + 1


def operations(pair: str) -> Iterator[tuple[str, list[Both]]]:
    """Every kind of operation of a target that may depend on the number of rows, with all its instances."""
    config = json.loads((target_path(pair) / "config.json").read_text())
    tensors = load_file(target_path(pair) / "model.safetensors")
    matrices = [each.bfloat16() for name, tensor in tensors.items() if "conv" not in name for each in _matrices(tensor)]
    yield "products with the weights", [product(weight) for weight in matrices]
    yield "attention", [attention(config, list(range(40, 1200, 150))) for _ in range(8)]
    if "linear_attention" in config["layer_types"]:
        yield "convolution", [convolution(config) for _ in range(8)]
        yield "gated delta rule", [gated_delta_rule(config) for _ in range(8)]


def _matrices(tensor: Tensor) -> list[Tensor]:
    """The matrices in a tensor of a checkpoint: one, or one of each expert, or none."""
    return [] if tensor.dim() < 2 else list(tensor.flatten(0, -3)) if tensor.dim() > 2 else [tensor]


def main(seed: Annotated[int, typer.Option()] = 0) -> None:
    """Print the share of results whose bits differ."""
    torch.manual_seed(seed)
    lines = []
    for pair in NAMES:
        for name, results in operations(pair):
            one, block = (torch.cat([each[side].flatten() for each in results]) for side in (0, 1))
            differ = int((one != block).sum())
            lines.append([pair, name, str(one.numel()), str(differ), f"{1e4 * differ / one.numel():.2f}"])
    typer.echo(describe_hardware(hardware()))
    typer.echo(Table("", "", ["pair", "operation", "results", "differ", "in 10,000"], lines).markdown())


if __name__ == "__main__":
    typer.run(main)
