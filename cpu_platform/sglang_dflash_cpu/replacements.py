"""SGLang functions that fail or are slow on a CPU, with their torch replacements."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from sglang_dflash_cpu import threads
from sglang_dflash_cpu.layers import ATTENTION_BACKEND, conv, dense, gdn, pools, step_ops


@dataclass(frozen=True)
class Replacement:
    """The dotted path of an SGLang function, and its replacement.

    A replacement whose first parameter is ``original`` handles some calls and passes the others on.
    """

    path: str
    function: Callable[..., Any]

    @property
    def partial(self) -> bool:
        return next(iter(signature(self.function).parameters)) == "original"


def _all_gather_into_tensor(self: Any, output: Tensor, input: Tensor) -> None:
    self._all_gather_into_tensor(output.view(-1), input.reshape(-1))  # gloo checks shapes, which differ for logits


def _copy_rows(dst: Tensor, src: Tensor, dim: int, offset: Any, sz: Any, offset_src: bool) -> None:
    from sglang.srt.layers.dp_attention import memcpy_cpu

    memcpy_cpu(dst, src, dim, int(offset), int(sz), offset_src)


def _reduce_scatter_tensor(self: Any, output: Tensor, input: Tensor) -> None:
    self._reduce_scatter_tensor(output, input)


def _pad_without_pinned_memory(original: Callable[..., Any], self: Any, model_runner: Any) -> None:
    from sglang.srt.model_executor import forward_batch_info

    forward_batch_info._is_cpu = True
    original(self, model_runner)


class _Unpinned:
    """``torch`` with factories that ignore ``pin_memory``."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        if name not in ("tensor", "zeros"):
            return found
        return lambda *args, pin_memory=False, **kwargs: found(*args, **kwargs)


def _load_adapters(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _Unpinned()
    original(self, *args, **kwargs)


def _rope_of_any_kind(
    original: Callable[..., Any], head_size: int, *args: Any, rope_scaling: Any = None, **options: Any
) -> Any:
    if (rope_scaling or {}).get("rope_type") != "deepseek_yarn":
        options.pop("device", None)
    return original(head_size, *args, rope_scaling=rope_scaling, **options)


def _leave_unpinned(buffer: Tensor, registration_granularity_bytes: int | None = None) -> None:
    return None


def _pad_heads(original: Callable[..., Any], model_config: Any, load_config: Any, tp_size: int) -> Any:
    from sglang.srt.runtime_context import get_parallel

    if "Gemma4" in str(model_config.hf_config.architectures):  # its layers differ, and are not padded
        return model_config
    return original(model_config, load_config, get_parallel().attn_tp_size)


def _resolve_dflash(original: Callable[..., Any], server_args: Any) -> None:
    from sglang.srt.arg_groups import speculative_hook

    before, speculative_hook.attn_dp_enabled_of = speculative_hook.attn_dp_enabled_of, lambda cfg: False
    try:
        original(server_args)
    finally:
        speculative_hook.attn_dp_enabled_of = before


def _kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:
    found = original(transfer_backend, class_type)
    if found is not None:
        found.supports_host_tensor_indices = False
    return found


def _send_prefix_with_the_rest(self: Any, req: Any, allow_send: bool = True) -> None:
    return None


_ALLOCATION = "sglang.srt.mem_cache.allocation."
_DISTRIBUTED = "sglang.srt.distributed."
_DISAGGREGATION = "sglang.srt.disaggregation."
_PREFILL_SERVER = _DISAGGREGATION + "prefill.SchedulerDisaggregationPrefillMixin."
_LINEAR = "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod."
_MOE = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe."
_NORM = "sglang.srt.layers.layernorm."
_PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj."
_CONV = "sglang.kernels.ops.mamba.causal_conv1d_triton."
_GATING = "sglang.kernels.ops.attention.linear."
_DELTA_RULE = "sglang.kernels.ops.attention.fla."
_VERIFY = _GATING + "fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update"
_DECODE = _DELTA_RULE + "fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode"
_STATES = "sglang.kernels.ops.mamba.mamba_state_scatter_triton."
_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise."

TABLE: tuple[Replacement, ...] = (
    # Triton: products independent of the number of rows, for deterministic inference
    Replacement("sglang.srt.batch_invariant_ops.enable_batch_invariant_mode", dense.enable_batch_invariant_mode),
    Replacement("sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head", dense.lm_head),
    # SGLang's compiled kernels: request seeds in deterministic inference
    Replacement("sglang.srt.layers.sampler.multinomial_with_seed", step_ops.draw_with_seeds),
    # Triton: slots of a block; the slot that a new page continues
    Replacement(_ALLOCATION + "assign_req_to_token_pool_func", pools.assign_slots),
    Replacement(_ALLOCATION + "get_last_loc", pools.last_slots),
    # Custom operator: gather of logits over tensor-parallel ranks
    Replacement(_DISTRIBUTED + "parallel_state.GroupCoordinator.all_gather_into_tensor", _all_gather_into_tensor),
    # Binds ranks to cores through Intel AMX kernels that are not installed
    Replacement(_DISTRIBUTED + "bootstrap._init_cpu_threads_env", threads.bind_rank),
    # DP attention: gathered rows (Triton), sum of outputs (custom operator), token counts (pinned memory), heads padded
    # for all ranks, and a step for CUDA only that does not affect DFLASH
    Replacement("sglang.srt.layers.dp_attention.memcpy", _copy_rows),
    Replacement(_DISTRIBUTED + "parallel_state.GroupCoordinator.reduce_scatter_tensor", _reduce_scatter_tensor),
    Replacement(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch", _pad_without_pinned_memory
    ),
    Replacement("sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp", _pad_heads),
    Replacement("sglang.srt.arg_groups.speculative_hook._handle_dflash", _resolve_dflash),
    # Disaggregation: pinned memory and CUDA events for slot numbers, and a CUDA event for a cached prefix
    Replacement(_DISAGGREGATION + "utils.get_kv_class", _kv_class),
    Replacement(_PREFILL_SERVER + "maybe_send_cached_prefix_chunk", _send_prefix_with_the_rest),
    # Pinned memory: adapters; the host's table of routed experts
    Replacement("sglang.srt.lora.lora_manager.LoRAManager.__init__", _load_adapters),
    Replacement("sglang.srt.mem_cache.pool_host.common._cuda_host_register", _leave_unpinned),
    # Slow: weights stored by output on Intel processors, float32 products of MKL on AMD processors
    Replacement(_LINEAR + "create_weights", dense.create_weights),
    Replacement(_LINEAR + "apply", dense.apply),
    # Triton: the soft cap of logits. torch.compile: gpt-oss's activation (100 s)
    Replacement("sglang.kernels.ops.activation.softcap.softcap_inplace_logits", dense.softcap),
    Replacement(_MOE + "swiglu_gpt_oss_sigmoid_alpha", dense.swiglu),
    # Slow: 7 and 8 calls with 2 reductions
    Replacement(_NORM + "RMSNorm.forward_native", dense.rms_norm),
    Replacement(_NORM + "GemmaRMSNorm.forward_native", dense.gemma_rms_norm),
    # Wrong: without the router's scale, which SGLang folds into the weight of a norm without one
    Replacement(_NORM + "Gemma4RMSNorm.forward_native", dense.gemma4_rms_norm),
    # Triton: GDN layers of Qwen3-Next and Qwen3.5, in call order
    Replacement(_PROJECTIONS + "fused_qkvzba_split_reshape_cat", gdn.split_grouped),  # Qwen3-Next
    Replacement(_PROJECTIONS + "fused_qkvzba_split_reshape_cat_contiguous", gdn.split),  # Qwen3.5
    Replacement(_CONV + "causal_conv1d_fn", conv.prefill),
    Replacement(_CONV + "causal_conv1d_update", conv.update),  # decode and verify
    Replacement(_GATING + "fused_gdn_gating.fused_gdn_gating", gdn.decay_and_strength),
    Replacement(_DELTA_RULE + "chunk.chunk_gated_delta_rule", gdn.prefill),  # also refuses fp32
    Replacement(_DECODE, gdn.decode),
    Replacement(_VERIFY, gdn.verify),  # of SGLang's own worker
    Replacement(_DELTA_RULE + "fused_norm_gate.rms_norm_gated", dense.rms_norm_gated),  # Qwen3-Next
    Replacement(_DELTA_RULE + "layernorm_gated.layernorm_fn", dense.layernorm_gated),  # Qwen3.5
    # Refuses other rotary embeddings than DeepSeek's in MLA layers
    Replacement("sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper", _rope_of_any_kind),
    # Triton: snapshots for the prefix cache; states of accepted tokens, or their convolution windows
    Replacement(_STATES + "track_mamba_states_all_layers", pools.track),
    Replacement(_STATES + "track_mamba_states_if_needed", pools.track_layer),
    Replacement(_STATES + "scatter_mamba_states_after_mtp_verify", pools.commit),
    # Triton: gates of the attention's output and of the shared expert
    Replacement(_ELEMENTWISE + "fused_sigmoid_mul", dense.sigmoid_mul),
    Replacement(_ELEMENTWISE + "fused_gate_sigmoid_mul_add", dense.add_gated),
)

# Of modules that only schedulers import
OF_MODELS: tuple[Replacement, ...] = (
    # Triton: MiniMax-M2's norms of queries and keys
    Replacement("sglang.srt.models.minimax_m2.rms_sumsq_serial", dense.sums_of_squares),
    Replacement("sglang.srt.models.minimax_m2.rms_apply_serial", dense.norm_queries_and_keys),
)


def install() -> None:
    """Register every row of ``TABLE``, once per process; make torch behave as its CPU build does.

    Disable ``pin_memory`` and ``record_stream``. A CUDA build names CUDA as the accelerator of a machine without a GPU,
    so ``torch.get_device_module()`` would return ``torch.cuda``, which looks for a driver.
    """
    Tensor.pin_memory = _pin_memory  # type: ignore[method-assign, assignment]
    Tensor.record_stream = _record_stream  # type: ignore[method-assign, assignment]
    torch._C._accelerator_getAccelerator = _no_accelerator  # type: ignore[assignment]
    torch.get_device_module.cache_clear()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for row in TABLE:
        if not any(hook is row.function for _, hook, _ in HookRegistry._hooks[row.path]):
            hook_type = HookType.AROUND if row.partial else HookType.REPLACE
            HookRegistry.register(row.path, row.function, hook_type)


def missing_hooks() -> list[str]:
    """Return the targets that are missing or not replaced; SGLang only logs a failed hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [row.path for row in TABLE if row.path not in HookRegistry._patched]


def complete_models() -> None:
    """Complete SGLang's models in a scheduler, which has imported them."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod

    for row in OF_MODELS:
        module, _, name = row.path.rpartition(".")
        setattr(import_module(module), name, row.function)
    # MLA is always absorbed: the K/V pool then holds what attention reads
    AttentionBackendRegistry.register(ATTENTION_BACKEND, lambda attention, batch: AttnForwardMethod.MLA)


def _pin_memory(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return tensor


def _record_stream(tensor: Tensor, stream: Any) -> None:
    return None


def _no_accelerator() -> None:
    return None
