"""Sigmoid gates of the Qwen3-Next and Qwen3.5 layers: of the attention's output, and of the shared expert."""

from __future__ import annotations

import torch
from torch import Tensor


def sigmoid_mul(attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False) -> Tensor:
    """``attn_output * sigmoid(gate)`` in fp32, rounded once.

    Args:
        attn_output: ``[tokens, heads * D]``; overwritten if ``inplace``.
        gate: the same elements, ``[tokens, heads * D]`` or a strided ``[tokens, heads, D]``.
        quant: asks for an FP8 result, which this platform does not have.
    """
    if quant:
        raise NotImplementedError("on a CPU, fused_sigmoid_mul has no FP8 output")
    out = attn_output if inplace else torch.empty_like(attn_output)
    return torch.mul(attn_output, gate.reshape(attn_output.shape).float().sigmoid(), out=out)


def add_gated(hidden_states: Tensor, gate_weight: Tensor, shared_output: Tensor, final_hidden_states: Tensor) -> None:
    """Add the shared expert, gated per token, in place: ``final += sigmoid(hidden @ gate_weight) * shared``.

    Args:
        hidden_states: input of the MoE block, ``[tokens, dim]``.
        gate_weight: ``[dim]``.
        shared_output: ``[tokens, dim]``.
        final_hidden_states: output of the routed experts, ``[tokens, dim]``.
    """
    gate = torch.mv(hidden_states.float(), gate_weight.float()).sigmoid_().unsqueeze(-1)
    torch.addcmul(final_hidden_states, gate, shared_output.float(), out=final_hidden_states)
