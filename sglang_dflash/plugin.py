"""Entry point ``sglang.srt.plugins: dflash``: register our hooks with SGLang.

SGLang's plugin loader only logs what a plugin raises, and DFLASH would then run on SGLang's own worker. So versions,
flags and pairs are checked in argument resolution, which stops the server. If registration fails, DFLASH is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream import SYMBOLS, check_symbols

CREATE_WORKER = "SpeculativeAlgorithm.create_worker"

_registered = False


def register() -> None:
    """Register every hook; a second call in one process does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register_hooks()
    except Exception as error:  # the loader is the process edge that reports it
        _refuse_dflash(error)
        raise


def is_registered() -> bool:
    """Return whether SGLang takes DFLASH's worker from this package in this process."""
    from sglang_dflash.upstream import HookRegistry

    return any(hook is _choose_worker for _, hook, _ in HookRegistry._hooks.get(SYMBOLS[CREATE_WORKER].path, ()))


def _register_hooks() -> None:
    from sglang_dflash.hooks import flags, launch, reports, streams
    from sglang_dflash.upstream import HookRegistry, HookType, register_resolution_hook

    HookRegistry.register(SYMBOLS[CREATE_WORKER].path, _choose_worker, HookType.AROUND)
    if _module("Scheduler.get_internal_state") in sys.modules:
        _register_scheduler_hooks()
    for name, function, how in (
        ("TokenizerManager._calculate_spec_decoding_metrics", reports.count_verified_drafts, HookType.AFTER),
        ("DetokenizerManager._decode_batch_token_id_output", streams.send_once, HookType.AROUND),
        ("TokenizerManager.init_tokenizer_and_processor", streams.keep_tokenizer, HookType.AFTER),
        ("TokenizerManager.generate_request", streams.remember, HookType.AROUND),
        ("FunctionCallParser.parse_non_stream", streams.mark_whole, HookType.BEFORE),
        ("FunctionCallParser.parse_stream_chunk", streams.parse, HookType.AROUND),
        ("JsonArrayParser.parse_streaming_increment", streams.parse, HookType.AROUND),
        ("ReasoningParser.parse_stream_chunk", streams.parse, HookType.AROUND),
        ("write_data_for_multi_tokenizer", reports.load_in_tokenizer_workers, HookType.BEFORE),
        ("ServerArgs.resolved_dict", reports.report_adaptive, HookType.AFTER),
        ("ServerArgs.add_cli_args", flags.accept_old_flags, HookType.AFTER),
        ("ModelConfig._derive_context_length", launch.extend_drafter_context, HookType.BEFORE),
    ):
        HookRegistry.register(SYMBOLS[name].path, function, how)
    register_resolution_hook("handle_model_source_paths")(launch.after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(launch.around_speculation)


def _module(name: str) -> str:
    return SYMBOLS[name].path.rsplit(".", 2)[0]


def _choose_worker(original: Callable[..., type], *args: Any) -> type:
    # A scheduler that was imported after the plugins were loaded gets its hooks before it constructs a worker.
    from sglang_dflash.hooks.takeover import choose_worker
    from sglang_dflash.upstream import HookRegistry

    if SYMBOLS["KVCacheConfigurator.config_from_budget"].path not in HookRegistry._hooks:
        _register_scheduler_hooks()
        HookRegistry.apply_hooks()
    return choose_worker(original, *args)


def _register_scheduler_hooks() -> None:
    # The targets of these hooks import kernels, which would initialise the GPU in other processes.
    from sglang_dflash.hooks import decode_rows, ends, reports, requests, takeover, weights
    from sglang_dflash.states import replay
    from sglang_dflash.upstream import HookRegistry, HookType
    from sglang_dflash.worker import pools, state, window

    for name, function, how in (
        ("validate_dflash_request", requests.refuse_request, HookType.AROUND),
        ("create_grammar_backend", requests.refuse_without_rollback, HookType.AFTER),
        ("Req._compute_max_prefix_len", window.cap_prefix, HookType.AFTER),
        ("Req.update_finish_state", ends.end_at_first_token, HookType.AROUND),
        ("Session._concat_token_arrays", ends.forget_unseen_tokens, HookType.BEFORE),
        ("StreamingSession.try_cache_finished_req", ends.keep_streaming_turn, HookType.AROUND),
        ("ScheduleBatch._new_tokens_required_next_decode_spec_v2", state.tokens_required, HookType.AROUND),
        ("KVCacheConfigurator.config_from_budget", window.charge_rings, HookType.AROUND),
        ("KVCacheConfigurator._build_hybrid_req_pool", replay.build_pool, HookType.AROUND),
        ("KVCacheConfigurator._handle_max_mamba_cache", pools.divide, HookType.AROUND),
        ("gdn_replayssm_spec_decode", replay.verify, HookType.AROUND),
        ("TritonGDNKernel.target_verify", replay.verify_kept, HookType.AROUND),
        ("TritonAttnBackend.__init__", decode_rows.widen, HookType.AFTER),
        ("TritonAttnBackend.init_forward_metadata", decode_rows.prepare, HookType.AROUND),
        ("TritonAttnBackend.init_forward_metadata_out_graph", decode_rows.prepare, HookType.AROUND),
        ("TritonAttnBackend.forward_extend", decode_rows.attend, HookType.AROUND),
        ("SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch", window.start_transferred, HookType.AFTER),
        ("setup_state_kv_args", window.describe_rings, HookType.AFTER),
        ("Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture", takeover.capture_layers, HookType.AROUND),
        ("Scheduler.get_internal_state", reports.report_worker, HookType.AFTER),
        ("SchedulerWeightUpdaterManager._select_runners", weights.update_target_only, HookType.AFTER),
        ("WeightUpdater.update_weights_from_disk", weights.update_wholly, HookType.AROUND),
        ("WeightUpdater.update_weights_from_tensor", weights.update_wholly, HookType.AROUND),
        ("WeightUpdater.load_weights_from_distributed", weights.update_wholly, HookType.AROUND),
        ("_model_load_weights_direct", weights.load_directly, HookType.AROUND),
        ("SchedulerMetricsReporter.report_decode_stats", reports.report_mean_width, HookType.AROUND),
    ):
        HookRegistry.register(SYMBOLS[name].path, function, how)


def _refuse_dflash(error: Exception) -> None:
    # Make DFLASH fail with the reason, before weights load, without the imports that may have failed.
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse() -> None:
        check_symbols()  # names all that this SGLang lacks, if that is the reason
        raise DFlashError(
            f"sglang-dflash could not register with SGLang ({type(error).__name__}: {error})",
            expected="hooks and imports of the SGLang version that this release is tested with",
            remedy="install that version (`sglang-dflash version` names it), or uninstall sglang-dflash",
        ) from error

    def refuse_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        if str(server_args.speculative_algorithm).upper() == "DFLASH":
            refuse()

    def refuse_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
        if algorithm.is_dflash():
            refuse()
        return original(algorithm, server_args)

    HookRegistry.register(SYMBOLS[CREATE_WORKER].path, refuse_worker, HookType.AROUND)
    register_resolution_hook("handle_model_source_paths")(refuse_arguments)
