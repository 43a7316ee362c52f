"""Entry point ``sglang.srt.plugins: dflash``: register our hooks with SGLang.

SGLang's plugin loader only logs exceptions, so argument resolution refuses DFLASH if registration fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash.upstream import check_version, misfit

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"
_CONFIG = "srt.configs.model_config.ModelConfig"
_GATHER = "srt.managers.scheduler_components.dp_attn"
_GDN = "srt.layers.attention.linear.gdn_backend.GDNAttnBackend"
_POOLS = "srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
_REQUEST = "srt.managers.schedule_batch.Req"
_RESULTS = "srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
_TRITON = "srt.layers.attention.triton_backend.TritonAttnBackend"

Hooks = dict[str, Callable[..., Any]]  # by target, below ``sglang``

_registered = False


def register() -> None:
    """Register every hook, once per process."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register_hooks()
    except Exception as error:  # process edge: the loader reports it
        _refuse_dflash(error)
        raise


def is_registered() -> bool:
    """Return whether SGLang uses this package's DFLASH worker in this process."""
    from sglang_dflash.upstream.launch import HookRegistry

    return any(hook is _choose_worker for _, hook, _ in HookRegistry._hooks.get(CREATE_WORKER, ()))


def _register_hooks() -> None:
    from sglang_dflash.features import reports, streams
    from sglang_dflash.features.updates import requests as trainers
    from sglang_dflash.launch import flags
    from sglang_dflash.launch import resolve as launch
    from sglang_dflash.upstream import hooks
    from sglang_dflash.upstream.launch import HookRegistry, HookType, register_resolution_hook

    HookRegistry.register(CREATE_WORKER, _choose_worker, HookType.AROUND)
    if "sglang.srt.managers.scheduler" in sys.modules:
        _register_scheduler_hooks()
    before: Hooks = {
        f"{_CONFIG}.__init__": launch.override_drafter,
        f"{_CONFIG}._derive_context_length": launch.lift_context,
    }
    after: Hooks = {
        "srt.server_args.ServerArgs.add_cli_args": flags.accept_old_flags,
    }
    _register(before, {}, after)
    for table in (
        streams.TOKENIZER_HOOKS,
        streams.DETOKENIZER_HOOKS,
        reports.TOKENIZER_HOOKS,
        trainers.TOKENIZER_HOOKS,
    ):
        hooks.register(table)
    register_resolution_hook("handle_model_source_paths")(launch.after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(launch.around_speculation)


def _choose_worker(original: Callable[..., type], *args: Any) -> type:
    # a scheduler imported after the plugins were loaded gets its hooks here
    from sglang_dflash.launch.takeover import choose_worker
    from sglang_dflash.upstream.launch import HookRegistry

    if f"sglang.{_POOLS}.config_from_budget" not in HookRegistry._hooks:
        _register_scheduler_hooks()
        HookRegistry.apply_hooks()
    return choose_worker(original, *args)


def _register_scheduler_hooks() -> None:
    # their targets import kernels, which would initialise the GPU in other processes
    from sglang_dflash.features import exact, hidden, pools, ranks, window
    from sglang_dflash.launch import resolve as launch
    from sglang_dflash.launch import takeover
    from sglang_dflash.model import backend
    from sglang_dflash.states import replay, verify
    from sglang_dflash.worker import state

    before: Hooks = {
        f"{_GATHER}.prepare_mlp_sync_batch_raw": ranks.note_batch,
    }
    around: Hooks = {
        f"{_GATHER}.MLPSyncBatchInfo.all_gather": ranks.gather,
        "srt.model_executor.model_runner_components.spec_aux_hidden_state._resolve_dflash_aux_hidden_state": (
            launch.capture_without_drafter
        ),
        "srt.managers.schedule_batch.ScheduleBatch._new_tokens_required_next_decode_spec_v2": state.tokens_required,
        f"{_POOLS}.config_from_budget": window.charge_rings,
        f"{_POOLS}._build_hybrid_req_pool": replay.build_pool,
        f"{_POOLS}._handle_max_mamba_cache": pools.divide,
        f"{_POOLS}._build_hybrid_mamba_decode_req_pool": replay.build_pool,
        f"{_GDN}.forward_extend": verify.verify,
        f"{_TRITON}.init_forward_metadata": exact.prepare,
        f"{_TRITON}.init_forward_metadata_out_graph": exact.prepare,
        f"{_TRITON}.forward_extend": exact.attend,
        "srt.models.qwen3_vl.Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture": takeover.capture_layers,
        f"{_RESULTS}._append_prefill_hidden_states": hidden.own_columns,
        f"{_RESULTS}._append_decode_hidden_states": hidden.own_columns,
    }
    after: Hooks = {
        f"{_REQUEST}._compute_max_prefix_len": window.cap_prefix,
        f"{_TRITON}.__init__": exact.widen,
        f"{_GDN}.__init__": verify.take_projections,
        f"{_TRITON}.shared_read_ends": backend.read_to_the_end,
        "srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin.get_new_prebuilt_batch": window.start_transferred,
        "srt.disaggregation.utils.setup_state_kv_args": window.describe_rings,
    }
    _register(before, around, after)


def _register(*hooks: Hooks) -> None:
    from sglang_dflash.upstream.launch import HookRegistry, HookType

    for how, by_path in zip((HookType.BEFORE, HookType.AROUND, HookType.AFTER), hooks, strict=True):
        for path, hook in by_path.items():
            HookRegistry.register(f"sglang.{path}", hook, how)


def _refuse_dflash(error: Exception) -> None:
    # before weights load, without the imports that may have failed
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        if str(server_args.speculative_algorithm).upper() == "DFLASH":
            check_version()
            raise misfit(error) from error

    def refuse_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
        if algorithm.is_dflash():
            raise misfit(error) from error
        return original(algorithm, server_args)

    HookRegistry.register(CREATE_WORKER, refuse_worker, HookType.AROUND)
    register_resolution_hook("handle_model_source_paths")(refuse_arguments)
