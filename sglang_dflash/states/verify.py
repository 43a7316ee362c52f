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
from sglang_dflash.upstream.hooks import Hooks

gdn_convolve = by_device(reference.gdn_convolve, "sglang_dflash.states.convolution")


def take_projections(_: None, backend: Any, *args: Any, **options: Any) -> None:
    """Hook after ``GDNAttnBackend.__init__``: make SGLang's models pass projections unsplit, and :func:`verify` run.

    FlashInfer's verify of kept states wants separate queries, keys and values, so SGLang's own code calls it.
    """
    plan, by_flashinfer = serving.plan, backend.kernel_dispatcher.verify_kernel_is_flashinfer
    backend.supports_packed_verify = plan is not None and (plan.replay or not by_flashinfer)


def verify(
    original: Callable[..., Any], backend: Any, layer: Any, forward_batch: Any, mixed_qkv: Any, a: Any, b: Any,
    **others: Any,
) -> Any:  # fmt: skip
    """Hook around ``GDNAttnBackend.forward_extend``: return the outputs, and z if the projections are unsplit."""
    if not (backend.supports_packed_verify and forward_batch.forward_mode.is_target_verify()):
        call = {"layer": layer, "forward_batch": forward_batch, "mixed_qkv": mixed_qkv, "a": a, "b": b}
        return original(backend, **call, **others)
    plan, width = serving.the_plan(), forward_batch.spec_info.draft_token_num
    if unsplit := isinstance(mixed_qkv, tuple):
        mixed_qkv, gates = mixed_qkv
        b, a = gates.chunk(2, -1)
    bs, cache = len(mixed_qkv) // width, backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    slots = backend.forward_metadata.mamba_cache_indices[:bs]
    rows, windows = backend.verify_intermediate_state_indices[:bs], cache.intermediate_conv_window[0]
    mixed, z, a, b = gdn_convolve(
        mixed_qkv, a, b, layer.conv_weights, layer.bias, cache.conv[0], slots, windows, rows, width=width,
        silu=bool(layer.activation), round_beta=not (plan.replay or plan.exact) and replay.decode_rounds_beta(),
    )  # fmt: skip
    parts, sizes = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], -1), (layer.head_k_dim, layer.head_v_dim)
    q, k, v = (part.unflatten(-1, (-1, size)) for part, size in zip(parts, (sizes[0], *sizes), strict=True))
    inputs = (q, k, v, a, b, layer.A_log, layer.dt_bias, cache.temporal, slots)
    if plan.replay:
        out = replay.verify(*inputs, replay.pool_records(cache), forward_batch.req_pool_indices[:bs], width=width)
    else:
        out = keep(backend, *inputs, cache.intermediate_ssm, rows, width=width)
    return (out, z) if unsplit else out


def keep(
    backend: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, states: Tensor,
    slots: Tensor, kept: Any, rows: Tensor, *, width: int,
) -> Any:  # fmt: skip
    """Run a block of one layer, with the state after every token in ``kept``, ``[R, L >= width, HV, V, K]``."""
    if serving.the_plan().exact:
        return stepped.step_verify(
            q, k, v, a, b, A_log, dt_bias, states, slots, width=width, scale=k.shape[-1] ** -0.5,
            keep=lambda t, after: kept.select(1, t).index_copy_(0, rows.long(), after),
        )  # fmt: skip
    return backend.kernel_dispatcher.verify_kernel.target_verify(
        A_log=A_log, dt_bias=dt_bias, q=q[None], k=k[None], v=v[None], a=a, b=b, ssm_states=states, cache_indices=slots,
        query_start_loc=backend.forward_metadata.query_start_loc, intermediate_states_buffer=kept,
        intermediate_state_indices=rows, cache_steps=width, retrieve_parent_token=None,
    )  # fmt: skip


_GDN = "layers.attention.linear.gdn_backend.GDNAttnBackend"
HOOKS = Hooks(around={f"{_GDN}.forward_extend": verify}, after={f"{_GDN}.__init__": take_projections})
