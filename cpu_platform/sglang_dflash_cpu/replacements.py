"""Upstream functions that cannot run on a plain CPU, or run slowly there, and what stands in for each.

Every row names an SGLang function that is written in Triton (or assumes a CUDA stream, or is slow), the torch function
that replaces it, and why. Rows are applied through SGLang's own ``HookRegistry`` in every process; a test asserts that
each target has the parameters that its stand-in names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import Tensor

from sglang_dflash.upstream import Symbol
from sglang_dflash_cpu.arguments import threads
from sglang_dflash_cpu.layers import conv, gdn, gdn_chunk, kv, linear, mamba_state, norms


@dataclass(frozen=True)
class Replacement:
    """One stand-in.

    Attributes:
        path: dotted path of the SGLang function.
        function: the torch function that replaces it.
        reason: why the original cannot stay, in one line.
        partial: whether ``function`` takes over some calls only; it then gets the original as its first argument.
    """

    path: str
    function: Callable[..., Any]
    reason: str
    partial: bool = False

    @property
    def target(self) -> Symbol:
        """The SGLang function, with the parameters that ``function`` names."""
        parameters = list(signature(self.function).parameters.values())[self.partial :]
        variadic = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
        return Symbol(self.path, tuple(each.name for each in parameters if each.kind not in variadic))


def _all_gather_into_tensor(self: Any, output: Tensor, input: Tensor) -> None:
    """Gather every rank's ``input`` into ``output`` over the ``GroupCoordinator`` ``self``."""
    self._all_gather_into_tensor(output, input)


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    """Around ``get_kv_class``: a sender is not to copy slot numbers to pinned memory, behind a CUDA event."""
    found = original(transfer_backend, class_type)
    if found is not None:
        found.supports_host_tensor_indices = False
    return found


def _send_prefix_with_the_rest(self: Any, req: Any, allow_send: bool = True) -> None:
    """A cached prefix is not sent before its prefill: SGLang would guard it with a CUDA event."""


_ALLOCATION = "sglang.srt.mem_cache.allocation."
_DISTRIBUTED = "sglang.srt.distributed."
_LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod."
_NORM = "sglang.srt.layers.layernorm."
_PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj."
_CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton."
_GATING = "sglang.kernels.ops.attention.linear."
_DELTA_RULE = "sglang.kernels.ops.attention.fla."
_STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise."

TABLE: tuple[Replacement, ...] = (
    # --- KV slots; for all but a fixed list of attention backends these are Triton kernels
    Replacement(_ALLOCATION + "assign_req_to_token_pool_func", kv.assign_slots, "Triton: slots reserved for a block"),
    Replacement(_ALLOCATION + "get_last_loc", kv.last_slots, "Triton: the slot that a new page continues"),
    # --- ranks
    Replacement(
        _DISTRIBUTED + "parallel_state.GroupCoordinator.all_gather_into_tensor",
        _all_gather_into_tensor,
        "custom operator without a CPU kernel: gathers logits over tensor-parallel ranks",
    ),
    Replacement(
        _DISTRIBUTED + "bootstrap._init_cpu_threads_env",
        threads.bind_rank,
        "binds ranks to cores through Intel AMX kernels that are not installed, and does nothing without them",
    ),
    # --- prefill/decode disaggregation
    Replacement(
        "sglang.srt.disaggregation.utils.get_kv_class",
        _kv_class,
        "pinned memory and CUDA events: slot numbers on their way to Mooncake's sender",
        partial=True,
    ),
    Replacement(
        "sglang.srt.disaggregation.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        _send_prefix_with_the_rest,
        "CUDA event: a cached prefix on its way before the prefill",
    ),
    # --- linear layers and norms of every model
    Replacement(
        _LINEAR + "create_weights",
        linear.create_weights,
        "slow on Intel processors: products with weights stored output by output",
        partial=True,
    ),
    Replacement(_LINEAR + "apply", linear.apply, "slow on AMD processors: float32 products of MKL"),
    Replacement(_NORM + "RMSNorm.forward_native", norms.rms_norm, "slow: 7 calls, 2 reductions", partial=True),
    Replacement(
        _NORM + "GemmaRMSNorm.forward_native", norms.gemma_rms_norm, "slow: 8 calls, 2 reductions", partial=True
    ),
    # --- GDN layers of Qwen3-Next and Qwen3.5, in the order in which a layer calls them
    Replacement(
        _PROJECTIONS + "fused_qkvzba_split_reshape_cat",
        gdn.split_grouped,
        "Triton: splits the input projections of Qwen3-Next",
    ),
    Replacement(
        _PROJECTIONS + "fused_qkvzba_split_reshape_cat_contiguous",
        gdn.split,
        "Triton: splits the input projections of Qwen3.5",
    ),
    Replacement(_CONV + "causal_conv1d_fn", conv.prefill, "Triton: causal convolution of a prefill"),
    Replacement(_CONV + "causal_conv1d_update", conv.update, "Triton: causal convolution of a decode or a verify"),
    Replacement(
        _GATING + "fused_gdn_gating.fused_gdn_gating",
        gdn.decay_and_strength,
        "Triton: log-decay and write strength of a prefill",
    ),
    Replacement(
        _DELTA_RULE + "chunk.chunk_gated_delta_rule",
        gdn_chunk.prefill,
        "Triton, and refuses fp32: gated delta rule of a prefill",
    ),
    Replacement(
        _DELTA_RULE + "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode",
        gdn.decode,
        "Triton: gated delta rule of a decode",
    ),
    Replacement(
        _GATING + "fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update",
        gdn.verify,
        "Triton: gated delta rule of a verify; stores the state after every token",
    ),
    Replacement(
        _DELTA_RULE + "fused_norm_gate.rms_norm_gated", norms.rms_norm_gated, "Triton: Qwen3-Next's output norm"
    ),
    Replacement(_DELTA_RULE + "layernorm_gated.layernorm_fn", norms.layernorm_gated, "Triton: Qwen3.5's output norm"),
    Replacement(_STATES + "track_mamba_states_all_layers", mamba_state.track, "Triton: snapshots for the prefix cache"),
    Replacement(
        _STATES + "scatter_mamba_states_after_mtp_verify", mamba_state.commit, "Triton: accepted tokens' states"
    ),
    Replacement(
        _STATES + "fused_conv_window_scatter_with_mask",
        mamba_state.scatter_steps,
        "Triton: accepted tokens' convolution windows, where recurrent states are replayed",
    ),
    # --- attention and MoE layers of the same models
    Replacement(_ELEMENTWISE + "fused_sigmoid_mul", norms.sigmoid_mul, "Triton: gate of the attention's output"),
    Replacement(_ELEMENTWISE + "fused_gate_sigmoid_mul_add", norms.add_gated, "Triton: gated shared expert"),
)


def install() -> None:
    """Register every row with SGLang's hook registry, and make two methods of tensors harmless; once a process.

    SGLang calls these two on fixed paths without asking the platform, and both raise without an accelerator.
    ``pin_memory`` promises host memory, which a CPU tensor has already; ``record_stream`` protects memory from other
    streams, and there are none.
    """
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]
    from sglang_dflash.upstream import HookRegistry, HookType

    for row in TABLE:
        if not any(hook is row.function for _, hook, _ in HookRegistry._hooks[row.path]):
            hook_type = HookType.AROUND if row.partial else HookType.REPLACE
            HookRegistry.register(row.path, row.function, hook_type)


def missing_hooks() -> list[str]:
    """Targets that this SGLang lacks or that are not (yet) replaced: it only logs a hook that fails to apply."""
    return [row.path for row in TABLE if row.target.problem() or not hasattr(row.target.resolve(), "__wrapped__")]


def _pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None
