"""The seam to SGLang: every fragile upstream name this package uses, in one table.

Import a name from here (``from sglang_dflash.upstream import BaseSpecWorker``) and it is resolved on first use, so
importing this module imports nothing of SGLang. :func:`check` resolves the whole table and compares the parameters
that we rely on, so that a new SGLang release breaks here, in one message, and not in the middle of a step.
The CPU platform's function replacements have a table of their own (:mod:`sglang_dflash.cpu.replacements`), because
there the upstream name is the *target* of a hook; :func:`check` is given those rows too.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sglang_dflash.errors import DFlashError

SUPPORTED_VERSIONS = ("0.5.23",)
ALLOW_ANY_VERSION = "SGLANG_DFLASH_ALLOW_ANY_SGLANG"


@dataclass(frozen=True)
class Symbol:
    """An upstream object and the parameters we pass to it.

    Attributes:
        path: dotted path of the object, the class attribute included (``"pkg.mod.Class.method"``).
        params: parameter names that must exist in its signature; empty for constants and types.
    """

    path: str
    params: tuple[str, ...] = ()

    def resolve(self) -> Any:
        return pkgutil.resolve_name(self.path)

    def problem(self) -> str | None:
        """One line saying what is wrong with the symbol in the installed SGLang, or None."""
        try:
            target = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.path}: not found ({error})"
        if not self.params:
            return None
        found = inspect.signature(target).parameters
        missing = [name for name in self.params if name not in found]
        return f"{self.path}: parameters {missing} not in ({', '.join(found)})" if missing else None


_SRT = "sglang.srt."

SYMBOLS: dict[str, Symbol] = {
    # plugins and platforms
    "HookRegistry": Symbol(_SRT + "plugins.hook_registry.HookRegistry"),
    "HookType": Symbol(_SRT + "plugins.hook_registry.HookType"),
    "load_plugins": Symbol(_SRT + "plugins.load_plugins"),
    "CpuDeviceMixin": Symbol(_SRT + "platforms.cpu.CpuDeviceMixin"),
    "SRTPlatform": Symbol(_SRT + "platforms.interface.SRTPlatform"),
    "PlatformCapabilities": Symbol(_SRT + "platforms.interface.PlatformCapabilities"),
    "PlatformEnum": Symbol(_SRT + "platforms.device_mixin.PlatformEnum"),
    # start-up: the drafter's runner, and what the configuration resolved to
    "ModelRegistry": Symbol(_SRT + "models.registry.ModelRegistry"),
    "SpeculativeAlgorithm": Symbol(_SRT + "speculative.spec_info.SpeculativeAlgorithm"),
    "build_draft_tp_worker": Symbol(
        _SRT + "speculative.draft_worker_common.build_draft_tp_worker",
        ("server_args", "gpu_id", "nccl_port", "target_model_config", "algo_label"),
    ),
    "resolve_draft_parallel_layout": Symbol(
        _SRT + "speculative.draft_parallel.resolve_draft_parallel_layout", ("model_spec", "collapse_cp")
    ),
    "DraftParallelSpec": Symbol(_SRT + "configs.draft_parallel.DraftParallelSpec"),
    "DraftTPExecution": Symbol(_SRT + "configs.draft_parallel.DraftTPExecution"),
    "draft_tp_context": Symbol(_SRT + "speculative.spec_utils.draft_tp_context", ("layout",)),
    "draft_pp_context": Symbol(_SRT + "speculative.spec_utils.draft_pp_context"),
    "get_observability": Symbol(_SRT + "runtime_context.get_observability"),
    "get_serving": Symbol(_SRT + "runtime_context.get_serving"),
    "get_parallel": Symbol(_SRT + "runtime_context.get_parallel"),
    "get_schedule": Symbol(_SRT + "runtime_context.get_schedule"),
    "get_spec": Symbol(_SRT + "runtime_context.get_spec"),
    "resolving_view": Symbol(_SRT + "arg_groups.overrides.resolving_view", ("server_args",)),
    # the worker and what it hands to the scheduler
    "BaseSpecWorker": Symbol(_SRT + "speculative.base_spec_worker.BaseSpecWorker"),
    "GenerationBatchResult": Symbol(
        _SRT + "managers.utils.GenerationBatchResult",
        ("logits_output", "next_token_ids", "accept_lens", "new_seq_lens", "next_draft_input"),
    ),
    "SpecInput": Symbol(_SRT + "speculative.spec_info.SpecInput", ("spec_input_type",)),
    "SpecInputType": Symbol(_SRT + "speculative.spec_info.SpecInputType"),
    "alloc_for_spec_decode": Symbol(
        _SRT + "mem_cache.allocation.alloc_for_spec_decode",
        ("reqs", "req_pool_indices", "cur_kv_lens", "nxt_kv_lens", "num_needed_tokens", "batch"),
    ),
    "page_aligned_decode_alloc_lens": Symbol(
        _SRT + "mem_cache.allocation_sizing.page_aligned_decode_alloc_lens", ("reqs", "reserve", "page_size")
    ),
    "get_alloc_reserve_per_decode": Symbol(_SRT + "mem_cache.allocation_sizing.get_alloc_reserve_per_decode"),
    "async_d2h": Symbol(_SRT + "utils.common.async_d2h", ("tensor",)),
    "async_h2d": Symbol(_SRT + "utils.common.async_h2d", ("args", "dtype", "device")),
    "record_stream_each": Symbol(_SRT + "speculative.spec_utils.record_stream_each", ("tensors", "stream")),
    # one step
    "CaptureHiddenMode": Symbol(_SRT + "model_executor.forward_batch_info.CaptureHiddenMode"),
    "DFlashVerifyInput": Symbol(
        _SRT + "speculative.dflash_info.DFlashVerifyInput",
        ("draft_token", "positions", "draft_token_num", "capture_hidden_mode", "kv_loc_plan"),
    ),
    "ForwardBatch": Symbol(
        _SRT + "model_executor.forward_batch_info.ForwardBatch",
        (
            "forward_mode",
            "batch_size",
            "input_ids",
            "req_pool_indices",
            "seq_lens",
            "out_cache_loc",
            "seq_lens_sum",
        ),
    ),
    "ForwardMode": Symbol(_SRT + "model_executor.forward_batch_info.ForwardMode"),
    "GrammarTree": Symbol(_SRT + "speculative.spec_utils.GrammarTree"),
    "build_grammar_vocab_mask": Symbol(
        _SRT + "speculative.spec_utils.build_grammar_vocab_mask",
        ("reqs", "tree", "sampling_info", "device", "barrier"),
    ),
    "SpecTpSync": Symbol(_SRT + "speculative.spec_tp_sync.SpecTpSync", ("tp_group",)),
    "SpecTpSyncSite": Symbol(_SRT + "speculative.spec_tp_sync.SpecTpSyncSite"),
    "commit_mamba_states_after_verify": Symbol(
        _SRT + "speculative.spec_utils.commit_mamba_states_after_verify",
        ("target_worker", "batch", "accept_lens", "accept_index", "draft_token_num", "prepared_step_indices"),
    ),
    "mamba_track_grid": Symbol(_SRT + "runtime_context.mamba_track_grid", ("tree_page",)),
    "prepare_mamba_track_for_verify": Symbol(
        _SRT + "speculative.spec_utils.prepare_mamba_track_for_verify", ("batch",)
    ),
    "compute_spec_logprobs": Symbol(
        _SRT + "layers.logprob_processor.compute_spec_logprobs",
        ("batch", "logits_output", "predict", "chain_stride"),
    ),
    "Sampler": Symbol(_SRT + "layers.sampler.Sampler"),
    "KVWriteLoc": Symbol(_SRT + "mem_cache.memory_pool.KVWriteLoc", ("loc", "physical")),
    # the drafter's layers
    "AttentionType": Symbol(_SRT + "layers.radix_attention.AttentionType"),
    "LogitsProcessorOutput": Symbol(_SRT + "layers.logits_processor.LogitsProcessorOutput", ("next_token_logits",)),
    "QKVParallelLinear": Symbol(
        _SRT + "layers.linear.QKVParallelLinear",
        (
            "hidden_size",
            "head_size",
            "total_num_heads",
            "total_num_kv_heads",
            "bias",
            "quant_config",
            "prefix",
        ),
    ),
    "Qwen2MLP": Symbol(
        _SRT + "models.qwen2.Qwen2MLP",
        ("hidden_size", "intermediate_size", "hidden_act", "quant_config", "prefix"),
    ),
    "RMSNorm": Symbol(_SRT + "layers.layernorm.RMSNorm", ("hidden_size", "eps")),
    "RadixAttention": Symbol(
        _SRT + "layers.radix_attention.RadixAttention",
        ("num_heads", "head_dim", "scaling", "num_kv_heads", "layer_id", "sliding_window_size", "attn_type"),
    ),
    "ReplicatedLinear": Symbol(
        _SRT + "layers.linear.ReplicatedLinear",
        ("input_size", "output_size", "bias", "quant_config", "prefix"),
    ),
    "RowParallelLinear": Symbol(
        _SRT + "layers.linear.RowParallelLinear",
        ("input_size", "output_size", "bias", "quant_config", "prefix"),
    ),
    "UnquantizedLinearMethod": Symbol(_SRT + "layers.quantization.unquant.UnquantizedLinearMethod"),
    "default_weight_loader": Symbol(_SRT + "model_loader.weight_utils.default_weight_loader"),
    "get_rope": Symbol(
        _SRT + "layers.rotary_embedding.get_rope",
        ("head_size", "rotary_dim", "max_position", "base", "is_neox_style", "rope_scaling"),
    ),
    "unwrap_lora_layer": Symbol(_SRT + "lora.layers.unwrap_lora_layer", ("module",)),
    # attention
    "AttentionBackend": Symbol(_SRT + "layers.attention.base_attn_backend.AttentionBackend"),
    "register_attention_backend": Symbol(
        _SRT + "layers.attention.attention_registry.register_attention_backend", ("name",)
    ),
    "ATTENTION_BACKEND_CHOICES": Symbol(_SRT + "arg_groups.choices.ATTENTION_BACKEND_CHOICES"),
    "DRAFT_ATTENTION_BACKEND_CHOICES": Symbol(_SRT + "arg_groups.choices.DRAFT_ATTENTION_BACKEND_CHOICES"),
    "add_attention_backend_choices": Symbol(_SRT + "arg_groups.choices.add_attention_backend_choices"),
    "add_draft_attention_backend_choices": Symbol(_SRT + "arg_groups.choices.add_draft_attention_backend_choices"),
    # server arguments
    "register_resolution_hook": Symbol(_SRT + "arg_groups.resolution_hooks.register_resolution_hook", ("name",)),
    "declare_resolution": Symbol(_SRT + "arg_groups.overrides.declare_resolution", ("server_args", "source")),
    "model_config_of": Symbol(_SRT + "arg_groups.overrides.model_config_of", ("server_args",)),
    "Backend": Symbol(_SRT + "model_executor.cuda_graph_config.Backend"),
    "Phase": Symbol(_SRT + "model_executor.cuda_graph_config.Phase"),
    "with_phase": Symbol(_SRT + "model_executor.cuda_graph_config.with_phase", ("config", "phase")),
    "AttentionArch": Symbol(_SRT + "configs.model_config.AttentionArch"),
    "hybrid_gdn_config": Symbol(_SRT + "configs.hybrid_arch.hybrid_gdn_config", ("model_config",)),
    "mambaish_config": Symbol(_SRT + "configs.hybrid_arch.mambaish_config", ("model_config",)),
    # KV pools
    "ReqToTokenPool": Symbol(
        _SRT + "mem_cache.memory_pool.ReqToTokenPool",
        ("size", "max_context_len", "device", "enable_memory_saver"),
    ),
    "MHATokenToKVPool": Symbol(_SRT + "mem_cache.memory_pool.MHATokenToKVPool"),
    "SWAKVPool": Symbol(_SRT + "mem_cache.swa_memory_pool.SWAKVPool"),
}

# Methods that our subclasses override, or call where they do: reached through the class, so imported by no name.
METHODS = (
    Symbol(_SRT + "layers.sampler.Sampler.forward", ("logits_output", "sampling_info", "return_logprob")),
    Symbol(_SRT + "layers.sampler.Sampler._preprocess_logits", ("logits", "sampling_info")),
    Symbol(
        _SRT + "layers.sampler.Sampler._sample_from_probs",
        ("probs", "sampling_info", "positions", "simple_sampling_case"),
    ),
    Symbol(
        _SRT + "layers.sampler.Sampler._sync_token_ids_across_tp",
        ("batch_next_token_ids", "sampling_info"),
    ),
    Symbol(_SRT + "mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup"),
    Symbol(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._store_kv_layer",
        ("layer_idx", "loc", "cache_k", "cache_v"),
    ),
    Symbol(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer_prefix_valid",
        ("layer", "loc_2d", "commit_lens", "cache_k", "cache_v", "k_scale", "v_scale", "layer_id_override"),
    ),
)


def __getattr__(name: str) -> Any:
    symbol = SYMBOLS.get(name)
    if symbol is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: add it to SYMBOLS")
    value = symbol.resolve()
    globals()[name] = value
    return value


def installed_version() -> str | None:
    """Version of the installed SGLang distribution, None where there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def check_version() -> None:
    """Refuse an SGLang that this release was not tested with.

    Raises:
        DFlashError: naming the version found, the versions tested and the variable that overrides the check.
    """
    found = installed_version()
    if found in SUPPORTED_VERSIONS or os.environ.get(ALLOW_ANY_VERSION) == "1":
        return
    raise DFlashError(
        f"SGLang {found or 'not installed'}",
        expected=f"a version this release of sglang-dflash is tested with: {', '.join(SUPPORTED_VERSIONS)}",
        remedy=f"install sglang=={SUPPORTED_VERSIONS[-1]}, or set {ALLOW_ANY_VERSION}=1 to try this one",
    )


def check_symbols(extra: Iterable[Symbol] = ()) -> None:
    """Resolve every symbol and compare signatures.

    Raises:
        DFlashError: listing every symbol that is missing or lacks a parameter.
    """
    problems = [line for symbol in (*SYMBOLS.values(), *METHODS, *extra) if (line := symbol.problem())]
    if problems:
        raise DFlashError(
            f"SGLang {installed_version()} differs from what sglang-dflash calls: " + "; ".join(problems),
            expected=f"the interfaces of SGLang {', '.join(SUPPORTED_VERSIONS)}",
            remedy=f"install sglang=={SUPPORTED_VERSIONS[-1]} or a newer sglang-dflash",
        )
