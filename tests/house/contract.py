"""The contract with SGLang: every name of it that we use, with the parameters that we pass.

Names that we import come from the imports themselves. The table has what an import cannot show: parameters, methods,
and the targets of hooks, whose parameters are those that our function takes.
"""

from __future__ import annotations

import ast
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import sglang_dflash
import sglang_dflash_cpu

if TYPE_CHECKING:
    from sglang_dflash_cpu.replacements import Replacement


@dataclass(frozen=True)
class Symbol:
    """An upstream object and the parameters we pass to it.

    Attributes:
        path: dotted path of the object, ``"pkg.mod.Class.method"`` for a method.
        params: parameter names that must exist in its signature; empty if none is passed.
    """

    path: str
    params: tuple[str, ...] = ()

    def resolve(self) -> Any:
        return pkgutil.resolve_name(self.path)

    def problem(self) -> str | None:
        """Return one line on how the installed SGLang's symbol differs; None if it does not."""
        try:
            target = self.resolve()
        except (ImportError, AttributeError) as error:
            return f"{self.path}: not found ({error})"
        except (OSError, RuntimeError) as error:  # raised by GPU libraries that do not fit the driver
            return f"{self.path}: cannot be imported ({type(error).__name__}: {error})"
        if not self.params:
            return None
        found = inspect.signature(target).parameters
        missing = [name for name in self.params if name not in found]
        return f"{self.path}: parameters {missing} not in ({', '.join(found)})" if missing else None


# Module under ``sglang.srt`` or ``sglang.kernels`` -> names there, with the parameters.
_TABLE: dict[str, tuple[str, ...]] = {
    "arg_groups.overrides": (
        "declare_resolution(server_args, source)",
        "model_config_of(server_args)",
        "resolving_view(server_args)",
    ),
    "arg_groups.resolution_hooks": ("register_resolution_hook(name)",),
    "constrained.base_grammar_backend": ("create_grammar_backend(server_args)",),
    "configs.hybrid_arch": (
        "hybrid_gdn_config(model_config)",
        "mambaish_config(model_config)",
    ),
    "arg_groups.model_path_hook": ("handle_model_source_paths(server_args)",),
    "arg_groups.platform_hook": (
        "handle_cpu_backends(server_args)",
        "handle_hardware_runtime_validation(server_args)",
    ),
    "arg_groups.speculative_hook": ("handle_speculative_decoding(server_args)",),
    "model_executor.model_runner_components.spec_aux_hidden_state": (
        "_resolve_dflash_aux_hidden_state(config, server_args, model_config, spec_algorithm, is_draft_worker)",
    ),
    "configs.model_config": ("ModelConfig._derive_context_length(self, context_length)",),
    "server_args": (
        "ServerArgs.add_cli_args(parser)",
        "ServerArgs.resolved_dict(self)",
    ),
    "model_executor.cuda_graph_config": ("with_phase(config, phase)",),
    "models.qwen3_vl": (
        "Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture(self, layer_ids)",
        "Qwen3VLForConditionalGeneration.set_eagle3_layers_to_capture(self, layer_ids)",
    ),
    "runtime_context": ("mamba_track_grid(tree_page)",),
    "speculative.draft_parallel": ("resolve_draft_parallel_layout(model_spec, collapse_cp)",),
    "speculative.draft_worker_common": (
        "build_draft_tp_worker(server_args, gpu_id, nccl_port, target_model_config, algo_label)",
    ),
    "layers.attention.hybrid_linear_attn_backend": (
        "track_mamba_states_all_layers"
        "(conv_states_pool, ssm_states_pool, cache_indices, mamba_track_mask, mamba_track_indices, batch_size, "
        "check_freed_slots)",
        "MambaAttnBackendBase._replay_metadata(self, bs, req_pool_indices, forward_mode, spec_info, seq_lens_cpu, "
        "num_padding)",
    ),
    "layers.sampler": (
        "Sampler.forward(logits_output, sampling_info, return_logprob)",
        "Sampler._preprocess_logits(logits, sampling_info)",
        "Sampler._sample_from_probs(probs, sampling_info, positions, simple_sampling_case)",
    ),
    "managers.schedule_batch": (
        "Req(rid, origin_input_text, origin_input_ids, sampling_params, vocab_size)",
        "Req._compute_max_prefix_len(self, input_len)",
        "Req.is_prefill_only",
        "Req.update_finish_state(self, new_accepted_len)",
        "ScheduleBatch(reqs, req_to_token_pool, tree_cache, model_config, device, forward_mode, spec_algorithm, "
        "req_pool_indices, req_pool_indices_cpu, seq_lens, seq_lens_cpu, seq_lens_sum, orig_seq_lens, "
        "multimodal_inputs, sampling_info)",
        "ScheduleBatch._new_tokens_required_next_decode_spec_v2(self, requests, page_size)",
    ),
    "session.session_controller": ("Session._concat_token_arrays(last_req)",),
    "session.streaming_session": ("StreamingSession.try_cache_finished_req(self, req)",),
    "managers.multi_tokenizer_mixin": ("write_data_for_multi_tokenizer(port_args, server_args, scheduler_info)",),
    "managers.scheduler": ("Scheduler.get_internal_state(self)",),
    "managers.tokenizer_manager": (
        "TokenizerManager._calculate_spec_decoding_metrics(self, meta_info, recv_obj, i)",
        "TokenizerManager.generate_request(self, obj, request)",
        "TokenizerManager.init_tokenizer_and_processor(self)",
        "TokenizerManager._update_model_path_info(self, model_path, load_format)",
        "TokenizerManager.auto_create_handle_loop(self)",
        "TokenizerManager.resume_memory_occupation(self, obj, request)",
    ),
    "managers.scheduler_components.dp_attn": (
        "MLPSyncBatchInfo._get_fallback_tensor(self, device)",
        "MLPSyncBatchInfo._get_local_tensor(self, device)",
        "MLPSyncBatchInfo.all_gather(self, device)",
        "prepare_mlp_sync_batch_raw(local_batch)",
    ),
    "managers.scheduler_components.metrics_reporter": ("SchedulerMetricsReporter.report_decode_stats(self)",),
    "managers.scheduler_components.batch_result_processor": (
        "SchedulerBatchResultProcessor._append_prefill_hidden_states(req, logits_output)",
        "SchedulerBatchResultProcessor._append_decode_hidden_states(req, hidden_states)",
    ),
    "managers.scheduler_components.weight_updater": (
        "SchedulerWeightUpdaterManager._select_runners(self, selector)",
        "SchedulerWeightUpdaterManager.flush_cache_after_weight_update(self, recv_req, success, message)",
        "SchedulerWeightUpdaterManager.get_weights_by_name(self, recv_req)",
        "SchedulerWeightUpdaterManager.record_weight_version_after_update(self, weight_version)",
        "SchedulerWeightUpdaterManager.resume_memory_occupation(self, recv_req)",
        "SchedulerWeightUpdaterManager.update_weights_from_disk(self, recv_req)",
    ),
    "managers.utils": (
        "GenerationBatchResult(logits_output, next_token_ids, accept_lens, new_seq_lens, next_draft_input)",
    ),
    "mem_cache.allocation": (
        "assign_req_to_token_pool_func(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc, "
        "batch_size)",
        "alloc_for_spec_decode(reqs, req_pool_indices, cur_kv_lens, nxt_kv_lens, num_needed_tokens, batch)",
    ),
    "mem_cache.allocation_sizing": ("page_aligned_decode_alloc_lens(reqs, reserve, page_size)",),
    "model_executor.forward_batch_info": (
        "ForwardBatch(forward_mode, batch_size, input_ids, req_pool_indices, seq_lens, out_cache_loc, seq_lens_sum)",
        "ForwardBatch._init_num_token_non_padded(self, device, is_draft_worker)",
        "ForwardBatch.init_mlp_sync_metadata(self, batch, device)",
        "ForwardBatch.init_new(batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm)",
    ),
    "model_executor.model_runner": ("SamplingPrewarmResult(sampling_input_bytes, sampling_headroom_bytes)",),
    "model_executor.model_runner_components.attention_backend_setup": ("build_attention_backends(model_runner)",),
    "model_executor.model_runner_components.weight_updater": (
        "WeightUpdater.load_weights_from_distributed(self, named_tensors)",
        "WeightUpdater.update_weights_from_disk(self, model_path, load_format)",
        "WeightUpdater.update_weights_from_ipc(self, recv_req)",
        "WeightUpdater.update_weights_from_tensor(self, named_tensors, load_format)",
        "_model_load_weights_direct(model, named_tensors)",
    ),
    "model_executor.runner.decode_cuda_graph_runner": (
        "DecodeCudaGraphRunner(model_runner)",
        "DecodeCudaGraphRunner.capture(self)",
        "DecodeCudaGraphRunner.get_spec_info(self, num_tokens)",
    ),
    "sampling.sampling_batch_info": (
        "SamplingBatchInfo(temperatures, top_ps, top_ks, min_ps, is_all_greedy, is_any_greedy, need_top_p_sampling, "
        "need_top_k_sampling, need_min_p_sampling, vocab_size, device)",
    ),
    "speculative.base_spec_worker": ("BaseSpecWorker.prewarm_sampling(self)",),
    "speculative.dflash_info": (
        "DFlashVerifyInput(draft_token, positions, draft_token_num, capture_hidden_mode, kv_loc_plan, "
        "ragged_verify_layout)",
    ),
    "speculative.dflash_utils": ("validate_dflash_request(req, enable_overlap)",),
    "speculative.spec_info": (
        "SpecInput(spec_input_type)",
        "SpeculativeAlgorithm.create_worker(self, server_args)",
    ),
    "speculative.spec_tp_sync": ("SpecTpSync(tp_group)",),
    "speculative.spec_utils": (
        "build_grammar_vocab_mask(reqs, tree, sampling_info, device, barrier)",
        "commit_mamba_states_after_verify"
        "(target_worker, batch, accept_lens, accept_index, draft_token_num, prepared_step_indices)",
        "draft_tp_context(layout)",
        "prepare_mamba_track_for_verify(batch)",
        "record_stream_each(tensors, stream)",
        "set_mamba_track_indices_from_reqs(batch, track_positions)",
    ),
    "utils.common": (
        "async_d2h(tensor)",
        "async_h2d(args, dtype, device)",
        "async_h2d_stack(tensors, device)",
        "ceil_align(x, y)",
        "get_available_gpu_memory(device, gpu_id, distributed, cpu_group)",
    ),
    "function_call.function_call_parser": (
        "FunctionCallParser.parse_non_stream(self, full_text)",
        "FunctionCallParser.parse_stream_chunk(self, chunk_text)",
    ),
    "function_call.json_array_parser": ("JsonArrayParser.parse_streaming_increment(self, new_text, tools)",),
    "managers.detokenizer_manager": ("DetokenizerManager._decode_batch_token_id_output(self, recv_obj)",),
    "parser.reasoning_parser": ("ReasoningParser.parse_stream_chunk(self, chunk_text)",),
    "disaggregation.base.conn": ("StateType.REQUEST_ROW",),
    "disaggregation.decode": ("SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch(self, running_batch)",),
    "disaggregation.utils": (
        "append_state_component(kv_args, state_type, data_ptrs, data_lens, item_lens, layer_ids)",
        "setup_state_kv_args(kv_args)",
    ),
    "layers.attention.attention_registry": ("register_attention_backend(name)",),
    "layers.attention.flashinfer_backend": (
        "FlashInferIndicesUpdaterDecode.call_begin_forward",
        "FlashInferIndicesUpdaterPrefill.call_begin_forward",
    ),
    "layers.attention.triton_backend": (
        "TritonAttnBackend.__init__(self, model_runner)",
        "TritonAttnBackend.init_forward_metadata(self, forward_batch)",
        "TritonAttnBackend.init_forward_metadata_out_graph(self, forward_batch)",
        "TritonAttnBackend.forward_extend(self, q, k, v, layer, forward_batch)",
        "TritonAttnBackend.forward_decode(self, q, k, v, layer, forward_batch)",
        "TritonAttnBackend._target_verify_num_tokens_per_req(self, spec_info)",
        "update_sliding_window_buffer",
    ),
    "layers.layernorm": ("RMSNorm(hidden_size, eps)",),
    "layers.linear": (
        "QKVParallelLinear(hidden_size, head_size, total_num_heads, total_num_kv_heads, bias, quant_config, prefix)",
        "ReplicatedLinear(input_size, output_size, bias, quant_config, prefix)",
        "RowParallelLinear(input_size, output_size, bias, quant_config, prefix)",
    ),
    "layers.logits_processor": (
        "LogitsProcessor._compute_lm_head(self, hidden_states, lm_head)",
        "LogitsProcessor._get_logits(self, hidden_states, lm_head, logits_metadata)",
        "LogitsProcessorOutput(next_token_logits)",
    ),
    "layers.radix_attention": (
        "RadixAttention(num_heads, head_dim, scaling, num_kv_heads, layer_id, sliding_window_size, attn_type)",
    ),
    "layers.rotary_embedding.base": ("RotaryEmbedding._ensure_cos_sin_cache_length(needed_max_pos)",),
    "layers.rotary_embedding": ("get_rope(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)",),
    "lora.layers": ("unwrap_lora_layer(module)",),
    "models.dflash": ("_radix_topk(scores, k)",),
    "models.qwen2": ("Qwen2MLP(hidden_size, intermediate_size, hidden_act, quant_config, prefix)",),
    "kernels.ops.mamba.mamba_state_scatter_triton": (
        "scatter_mamba_states_after_mtp_verify(mamba_caches, state_indices_tensor, last_correct_step_indices, "
        "mamba_track_indices, mamba_steps_to_track)",
    ),
    "kernels.ops.attention.fla.fused_recurrent": (
        "fused_recurrent_gated_delta_rule_packed_decode(mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, "
        "ssm_state_indices, use_qk_l2norm_in_kernel)",
    ),
    "layers.attention.linear.kernels.gdn_triton": (
        "TritonGDNKernel.target_verify(self, A_log, dt_bias, q, k, v, a, b, ssm_states, cache_indices, "
        "query_start_loc, intermediate_states_buffer, intermediate_state_indices, retrieve_parent_token)",
    ),
    "kernels.ops.attention.linear.gdn_replayssm_spec_decode": (
        "gdn_replayssm_spec_decode(q, k, v, a, b, A_log, dt_bias, checkpoint_state, d_cache, k_cache, g_cache, "
        "rawv_cache, rawk_cache, out, ssm_state_indices, replay_indices, max_spec_len, scale)",
    ),
    "mem_cache.kv_cache_configurator": (
        "KVCacheConfigurator.config_from_budget(self, budget_bytes, cap_tokens)",
        "KVCacheConfigurator._build_hybrid_req_pool(self)",
        "KVCacheConfigurator._handle_max_mamba_cache(self, total_rest_memory)",
        "KVCacheConfigurator._calculate_mamba_ratio(self)",
    ),
    "model_executor.pool_configurator": ("create_memory_pool_configurator(kvc)",),
    "mem_cache.memory_pool": (
        "KVWriteLoc(loc, physical)",
        "MHATokenToKVPool._init_kv_copy_and_warmup",
        "MHATokenToKVPool._store_kv_layer(layer_idx, loc, cache_k, cache_v)",
        "MHATokenToKVPool.set_kv_buffer_prefix_valid"
        "(layer, loc_2d, commit_lens, cache_k, cache_v, k_scale, v_scale, layer_id_override)",
        "ReqToTokenPool(size, max_context_len, device, enable_memory_saver)",
    ),
}


def _table() -> Iterator[Symbol]:
    for module, rows in _TABLE.items():
        package = "sglang" if module.startswith("kernels.") else "sglang.srt"
        for row in rows:
            name, _, params = row.rstrip(")").partition("(")
            yield Symbol(f"{package}.{module}.{name}", tuple(params.replace(",", "").split()))


def _imported() -> Iterator[Symbol]:
    """Every name that the package or its CPU platform imports from SGLang, also for annotations and in functions."""
    for package in (sglang_dflash, sglang_dflash_cpu):
        for file in Path(package.__path__[0]).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and str(node.module).startswith("sglang."):
                    yield from (Symbol(f"{node.module}.{alias.name}") for alias in node.names)


SYMBOLS = {symbol.path: symbol for symbol in (*_imported(), *_table())}


def replaced(row: Replacement) -> Symbol:
    """The SGLang function that a row of the CPU platform replaces, with the parameters that its function names."""
    parameters = list(inspect.signature(row.function).parameters.values())[row.partial :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return Symbol(row.path, tuple(each.name for each in parameters if each.kind not in variadic))
