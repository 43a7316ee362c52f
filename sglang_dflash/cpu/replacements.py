"""Upstream functions that cannot run on a plain CPU, or run slowly there, and what stands in for each.

Every row names an SGLang function that is written in Triton (or assumes a CUDA stream, or is slow), the parameters that
our stand-in takes, why the original cannot stay, and the torch function that replaces it. Rows are applied through
SGLang's own ``HookRegistry`` in every process; a contract test asserts that each target has these parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_dflash.cpu.arguments import threads
from sglang_dflash.cpu.layers import (
    alloc,
    collectives,
    conv,
    gates,
    gdn,
    gdn_chunk,
    linear,
    mamba_state,
    norms,
)
from sglang_dflash.upstream import Symbol


@dataclass(frozen=True)
class Replacement:
    """One stand-in: ``target`` is replaced by ``function`` because of ``reason``.

    With ``partial`` the function takes over some calls only: it gets the original as its first argument.
    """

    target: Symbol
    function: Callable[..., Any]
    reason: str
    partial: bool = False


_ALLOCATION = "sglang.srt.mem_cache.allocation."
_OPS = "sglang.kernels.ops."

TABLE: tuple[Replacement, ...] = (
    Replacement(
        Symbol(
            _ALLOCATION + "assign_req_to_token_pool_func",
            ("req_pool_indices", "req_to_token", "start_offset", "end_offset", "out_cache_loc", "batch_size"),
        ),
        alloc.assign_slots,
        "Triton kernel: writes the KV slots that speculative decoding reserves into req_to_token",
    ),
    Replacement(
        Symbol(
            _ALLOCATION + "get_last_loc",
            ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
        ),
        alloc.last_slots,
        "Triton kernel for every backend but a fixed list of names: finds the slot that a new page continues",
    ),
    Replacement(
        Symbol("sglang.srt.distributed.parallel_state.GroupCoordinator.all_gather_into_tensor", ("output", "input")),
        collectives.all_gather_into_tensor,
        "custom operator without a CPU kernel: gathers logits over tensor-parallel ranks",
    ),
    Replacement(
        Symbol("sglang.srt.distributed.bootstrap._init_cpu_threads_env", ("local_omp_cpuid", "dist_init_method")),
        threads.bind_rank,
        "binds ranks to cores through Intel AMX kernels that are not installed, and does nothing without them",
    ),
    Replacement(
        Symbol(
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.create_weights",
            ("layer", "input_size_per_partition", "output_partition_sizes", "params_dtype"),
        ),
        linear.create_weights,
        "slow: on Intel processors, products with weights that are stored output by output",
        partial=True,
    ),
    Replacement(
        Symbol(
            "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
            ("layer", "x", "bias"),
        ),
        linear.apply,
        "slow: float32 products go through MKL, which lags behind oneDNN on AMD processors",
    ),
    Replacement(
        Symbol("sglang.srt.layers.layernorm.RMSNorm.forward_native", ("x", "residual")),
        norms.rms_norm,
        "slow: seven calls, two of them general reductions",
        partial=True,
    ),
    Replacement(
        Symbol("sglang.srt.layers.layernorm.GemmaRMSNorm.forward_native", ("x", "residual")),
        norms.gemma_rms_norm,
        "slow: eight calls, two of them general reductions",
        partial=True,
    ),
    # --- GDN layers of Qwen3-Next and Qwen3.5, in the order in which a layer calls them
    Replacement(
        Symbol(
            _OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
            ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
        ),
        gates.split_grouped_projections,
        "Triton kernel: splits the input projections of Qwen3-Next",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous",
            ("mixed_qkvz", "mixed_ba", "num_heads_qk", "num_heads_v", "head_qk", "head_v"),
        ),
        gates.split_projections,
        "Triton kernel: splits the input projections of Qwen3.5",
    ),
    Replacement(
        Symbol(
            _OPS + "mamba.causal_conv1d_triton.causal_conv1d_fn",
            ("x", "weight", "bias", "conv_states", "query_start_loc", "seq_lens_cpu", "cache_indices")
            + ("has_initial_state", "activation"),
        ),
        conv.prefill,
        "Triton kernel: causal convolution of a prefill",
    ),
    Replacement(
        Symbol(
            _OPS + "mamba.causal_conv1d_triton.causal_conv1d_update",
            ("x", "conv_state", "weight", "bias", "activation", "cache_seqlens", "conv_state_indices")
            + ("num_accept_tokens", "intermediate_conv_window", "intermediate_state_indices")
            + ("retrieve_next_token",),
        ),
        conv.update,
        "Triton kernel: causal convolution of a decode or a verify",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.linear.fused_gdn_gating.fused_gdn_gating",
            ("A_log", "a", "b", "dt_bias", "beta", "threshold"),
        ),
        gdn.gates,
        "Triton kernel: log-decay and write strength of a prefill",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.fla.chunk.chunk_gated_delta_rule",
            ("q", "k", "v", "g", "beta", "scale", "initial_state", "initial_state_indices", "cu_seqlens")
            + ("head_first", "use_qk_l2norm_in_kernel", "inplace_update"),
        ),
        gdn_chunk.prefill,
        "Triton kernels, and refuses fp32: gated delta rule of a prefill",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.fla.fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
            ("mixed_qkv", "a", "b", "A_log", "dt_bias", "scale", "initial_state", "out", "ssm_state_indices")
            + ("use_qk_l2norm_in_kernel",),
        ),
        gdn.decode,
        "Triton kernel: gated delta rule of a decode",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update",
            ("A_log", "a", "dt_bias", "softplus_beta", "softplus_threshold", "q", "k", "v", "b", "scale")
            + ("initial_state_source", "initial_state_indices", "use_qk_l2norm_in_kernel", "cu_seqlens")
            + ("disable_state_update", "intermediate_states_buffer", "intermediate_state_indices")
            + ("retrieve_parent_token", "is_kda", "cache_ring"),
        ),
        gdn.verify,
        "Triton kernel: gated delta rule of a verify; keeps what the commit needs of every token",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.fla.fused_norm_gate.rms_norm_gated",
            ("x", "g", "weight", "bias", "activation", "residual", "prenorm", "residual_in_fp32", "eps"),
        ),
        norms.rms_norm_gated,
        "Triton kernel: output norm of Qwen3-Next",
    ),
    Replacement(
        Symbol(
            _OPS + "attention.fla.layernorm_gated.layernorm_fn",
            ("x", "weight", "bias", "z", "eps", "group_size", "norm_before_gate", "is_rms_norm", "activation"),
        ),
        norms.layernorm_gated,
        "Triton kernel: output norm of Qwen3.5",
    ),
    Replacement(
        Symbol(
            _OPS + "mamba.mamba_state_scatter_triton.track_mamba_states_all_layers",
            ("conv_states_pool", "ssm_states_pool", "cache_indices", "mamba_track_mask")
            + ("mamba_track_indices", "batch_size", "check_freed_slots"),
        ),
        mamba_state.track,
        "Triton kernel: copies states to track slots at the boundaries of extra_buffer",
    ),
    Replacement(
        Symbol(
            _OPS + "mamba.mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify",
            ("mamba_caches", "state_indices_tensor", "last_correct_step_indices", "mamba_track_indices")
            + ("mamba_steps_to_track", "src_indices_raw"),
        ),
        mamba_state.commit,
        "Triton kernels: commits the states of the accepted tokens",
    ),
    # --- attention and MoE layers of the same models
    Replacement(
        Symbol(_OPS + "elementwise.elementwise.fused_sigmoid_mul", ("attn_output", "gate", "inplace", "quant")),
        gates.sigmoid_mul,
        "Triton kernel: output gate of Qwen3.5's attention",
    ),
    Replacement(
        Symbol(
            _OPS + "elementwise.elementwise.fused_gate_sigmoid_mul_add",
            ("hidden_states", "gate_weight", "shared_output", "final_hidden_states"),
        ),
        gates.add_gated,
        "Triton kernel: adds the gated shared expert",
    ),
)


def install() -> None:
    """Register every row with SGLang's hook registry; a second call in one process does nothing."""
    from sglang_dflash.upstream import HookRegistry, HookType

    for row in TABLE:
        if not any(hook is row.function for _, hook, _ in HookRegistry._hooks[row.target.path]):
            hook_type = HookType.AROUND if row.partial else HookType.REPLACE
            HookRegistry.register(row.target.path, row.function, hook_type)


def missing_hooks() -> list[str]:
    """Targets that are not (yet) replaced by our function: SGLang only logs a hook that fails to apply."""
    return [row.target.path for row in TABLE if getattr(row.target.resolve(), "__wrapped__", None) is None]
