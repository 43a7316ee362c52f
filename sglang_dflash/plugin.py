"""Entry point ``sglang.srt.plugins: dflash``: register our hooks with SGLang.

SGLang's plugin loader only logs exceptions, so argument resolution refuses DFLASH if registration fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from sglang_dflash.upstream import check_version, misfit

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"

_registered = False


def register() -> None:
    """Register what precedes a serving plan, once per process."""
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
    from sglang_dflash.launch import flags, resolve, takeover
    from sglang_dflash.upstream import hooks
    from sglang_dflash.upstream.hooks import Hooks
    from sglang_dflash.upstream.launch import register_resolution_hook

    config = "configs.model_config.ModelConfig"
    hooks.register(
        Hooks(
            before={
                f"{config}.__init__": resolve.override_drafter,
                f"{config}._derive_context_length": resolve.lift_context,
                "managers.detokenizer_manager.DetokenizerManager.__init__": takeover.enter_detokenizer,
            },
            around={CREATE_WORKER.removeprefix("sglang.srt."): _choose_worker},
            after={"server_args.ServerArgs.add_cli_args": flags.accept_old_flags},
        )
    )
    if "sglang.srt.managers.scheduler" in sys.modules:  # elsewhere their kernels would initialise the GPU
        capture = "models.qwen3_vl.Qwen3VLForConditionalGeneration.set_dflash_layers_to_capture"
        hooks.register(Hooks(around={capture: takeover.capture_layers}))
        capture = "model_executor.model_runner_components.spec_aux_hidden_state._resolve_dflash_aux_hidden_state"
        hooks.register(Hooks(around={capture: resolve.capture_without_drafter}))
    register_resolution_hook("handle_model_source_paths")(resolve.after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(resolve.around_speculation)


def _choose_worker(original: Callable[..., type], *args: Any) -> type:
    from sglang_dflash.launch.takeover import choose_worker  # imports no SGLang module before it is called

    return choose_worker(original, *args)


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
