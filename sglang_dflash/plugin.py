"""Entry point ``sglang.srt.plugins: dflash``: register our hooks with SGLang.

SGLang's plugin loader only logs exceptions, so argument resolution refuses DFLASH if registration fails.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_dflash.upstream import check_version, misfit

if TYPE_CHECKING:
    from sglang_dflash.upstream.hooks import Hooks

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
    from sglang_dflash import enter
    from sglang_dflash.launch import told
    from sglang_dflash.upstream import hooks
    from sglang_dflash.upstream.launch import register_resolution_hook

    of_all, of_schedulers = tables()
    hooks.register(of_all)
    if "sglang.srt.managers.scheduler" in sys.modules:  # elsewhere their kernels would initialise the GPU
        hooks.register(of_schedulers)
    register_resolution_hook("handle_model_source_paths")(told.after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(enter.around_speculation)


def tables() -> tuple[Hooks, Hooks]:
    """Return what is hooked before there is a plan, in every process and in schedulers."""
    from sglang_dflash import enter
    from sglang_dflash.launch import old_flags, told
    from sglang_dflash.model import capture
    from sglang_dflash.upstream.hooks import Hooks

    of_all = Hooks(
        before={
            "configs.model_config.ModelConfig.__init__": told.override_drafter,
            "configs.model_config.ModelConfig._derive_context_length": told.lift_context,
            "managers.detokenizer_manager.DetokenizerManager.__init__": enter.enter_detokenizer,
        },
        around={CREATE_WORKER.removeprefix("sglang.srt."): _choose_worker},
        after={"server_args.ServerArgs.add_cli_args": old_flags.accept_old_flags},
    )
    parts = "model_executor.model_runner_components"
    of_schedulers = Hooks(
        around={
            f"{parts}.attention_backend_setup.configure_aux_hidden_state_capture": capture.capture_layers,
            f"{parts}.spec_aux_hidden_state._resolve_dflash_aux_hidden_state": told.capture_without_drafter,
        }
    )
    return of_all, of_schedulers


def _choose_worker(original: Callable[..., type], *args: Any) -> type:
    from sglang_dflash.enter import choose_worker  # imports no SGLang module before it is called

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
