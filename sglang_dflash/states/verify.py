"""The verify of a GDN layer, from its input projections to its gated norm, in place of SGLang's.

Two kernels: the convolution, and the gated delta rule. Where SGLang's model passes its projections as they are
(``models/qwen3_5.py``, on CUDA), the first one also splits them; elsewhere SGLang has split them before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from sglang_dflash.ops import by_device
from sglang_dflash.plan import serving
from sglang_dflash.states import reference, replay, stepped

gdn_convolve = by_device(reference.gdn_convolve, "sglang_dflash.states.convolution")


def take_projections(_: None, backend: Any, *args: Any, **options: Any) -> None:
    """Hook after ``GDNAttnBackend.__init__``: make SGLang's models pass projections unsplit, and :func:`verify` run.

    FlashInfer's verify of kept states wants separate queries, keys and values, so SGLang's own code calls it.
    """
    plan, verifies = serving.plan, backend.kernel_dispatcher
    backend.supports_packed_verify = plan is not None and (plan.replay or not verifies.verify_kernel_is_flashinfer)


def verify(
    original: Callable[..., Any], backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any,
    **others: Any,
) -> Any:  # fmt: skip
    """Hook around ``GDNAttnBackend.forward_extend``: return the outputs, and z if the projections are unsplit."""
    if not (backend.supports_packed_verify and forward_batch.forward_mode.is_target_verify()):
        call = {"layer": layer, "forward_batch": forward_batch, "mixed_qkv": mixed_qkv, "a": a, "b": b}
        return original(backend, **call, **others)
    plan, width = serving.the_plan(), forward_batch.spec_info.draft_token_num
    unsplit = isinstance(mixed_qkv, tuple)
    if unsplit:
        mixed_qkv, gates = mixed_qkv
        b, a = gates.chunk(2, -1)
    bs = len(mixed_qkv) // width
    slots = backend.forward_metadata.mamba_cache_indices[:bs]
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    rows = backend.verify_intermediate_state_indices[:bs]
    mixed, z, a, b = gdn_convolve(
        *(mixed_qkv, a, b, layer.conv_weights, layer.bias, cache.conv[0], slots, cache.intermediate_conv_window[0]),
        rows,
        width=width,
        silu=layer.activation in ("silu", "swish"),
        round_beta=not (plan.replay or plan.exact) and replay.decode_rounds_beta(),
    )
    q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1)
    heads = (layer.num_q_heads, layer.head_q_dim), (layer.num_k_heads, layer.head_k_dim), z.shape[1:2] + (-1,)
    q, k, v = (part.unflatten(-1, size) for part, size in zip((q, k, v), heads, strict=True))
    inputs = (q, k, v, a, b, layer.A_log, layer.dt_bias, cache.temporal, slots)
    if plan.replay:
        records, of_requests = replay.pool_records(cache), forward_batch.req_pool_indices[:bs]
        out = replay.verify(*inputs, records, of_requests, width=width)
    elif plan.exact:
        out = keep_exactly(*inputs, cache.intermediate_ssm, rows, width=width)
    else:
        out = keep(backend, *inputs, cache.intermediate_ssm, rows, width=width)
    return (out, z) if unsplit else out


def keep(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, states: Tensor,
    slots: Tensor, kept: Tensor, rows: Tensor, *, width: int,
) -> Tensor:  # fmt: skip
    """Run a block with SGLang's Triton kernel, which stores the state after every token in ``kept``."""
    out: Tensor = backend.kernel_dispatcher.verify_kernel.target_verify(
        A_log=A_log, dt_bias=dt_bias, q=q[None], k=k[None], v=v[None], a=a, b=b, ssm_states=states, cache_indices=slots,
        query_start_loc=backend.forward_metadata.query_start_loc, intermediate_states_buffer=kept,
        intermediate_state_indices=rows, cache_steps=width, retrieve_parent_token=None,
    )  # fmt: skip
    return out


def keep_exactly(*inputs: Tensor, width: int) -> Tensor:
    """Run a block as plain decoding does; inputs as :func:`keep`'s."""
    *inputs, kept, rows = inputs
    return stepped.step_verify(
        *inputs,
        width=width,
        scale=inputs[0].shape[-1] ** -0.5,
        keep=lambda t, after: kept.select(1, t).index_copy_(0, rows.long(), after),
    )
