"""The verify of a GDN layer, from its input projections to its gated norm, in place of SGLang's.

It has two kernels: the convolution and a rule, which is the gated delta rule and records a block. Where SGLang's model
passes unsplit projections (``models/qwen3_5.py``, on CUDA), the convolution also splits them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from sglang_dflash.ops import by_device
from sglang_dflash.states import reference, replay
from sglang_dflash.upstream.hooks import Hooks

gdn_convolve = by_device(reference.gdn_convolve, "sglang_dflash.states.convolution")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]  # of ``gdn_verify``: q to slots
Rule = Callable[
    [Inputs, Any, Any], Tensor
]  # of these, SGLang's pools of the layer and its batch, to outputs [N, HV, V]


def take_projections(_: None, backend: Any, *args: Any, **options: Any) -> None:
    """Hook after ``GDNAttnBackend.__init__``: make SGLang's models pass projections unsplit."""
    backend.supports_packed_verify = True


def verify(
    rule: Rule, original: Any, backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any, **rest: Any
) -> Any:
    """Hook around ``GDNAttnBackend.forward_extend``: return the outputs, and z if the projections are unsplit."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, layer=layer, forward_batch=forward_batch, mixed_qkv=mixed_qkv, a=a, b=b, **rest)
    if unsplit := isinstance(mixed_qkv, tuple):
        mixed_qkv, gates = mixed_qkv
        b, a = gates.chunk(2, -1)
    width, cache = forward_batch.spec_info.draft_token_num, backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    slots = backend.forward_metadata.mamba_cache_indices[: len(mixed_qkv) // width]
    windows, rows = cache.intermediate_conv_window[0], backend.verify_intermediate_state_indices[: len(slots)]
    mixed, z, a, b = gdn_convolve(
        mixed_qkv, a, b, layer.conv_weights, layer.bias, cache.conv[0], slots, windows, rows, width=width,
        silu=bool(layer.activation), recurrent=cache.temporal,
    )  # fmt: skip
    q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    q, k = (part.unflatten(-1, (-1, layer.head_k_dim)) for part in (q, k))
    v = v.unflatten(-1, (-1, layer.head_v_dim))
    out = rule((q, k, v, a, b, layer.A_log, layer.dt_bias, cache.temporal, slots), cache, forward_batch)
    return (out, z) if unsplit else out


def record(inputs: Inputs, cache: Any, forward_batch: Any) -> Tensor:
    """Run a block of one layer and record its writes for a replay."""
    records, rows = replay.pool_records(cache), forward_batch.req_pool_indices[: len(inputs[-1])]
    width, scale = forward_batch.spec_info.draft_token_num, inputs[1].shape[-1] ** -0.5
    rounds = replay.decode_rounds_beta()
    return replay.gdn_verify(*inputs, records, rows, width=width, scale=scale, round_beta=rounds)


def hooks(rule: Rule) -> Hooks:
    """Return the hooks of a verify by ``rule``."""
    backend = "layers.attention.linear.gdn_backend.GDNAttnBackend"
    return Hooks(
        around={f"{backend}.forward_extend": partial(verify, rule)}, after={f"{backend}.__init__": take_projections}
    )


HOOKS = hooks(record)
