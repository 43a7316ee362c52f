"""Entry points ``dflash``: ``register`` for SGLang's plugins, ``load_before_resolution`` for its platforms.

SGLang's plugin loader only logs exceptions, so argument resolution refuses DFLASH if registration fails.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from sglang_dflash.upstream import BUILTIN, SWITCH, check_version, misfit

CREATE_WORKER = "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker"

logger = logging.getLogger(__name__)
_registered = False


def load_before_resolution() -> None:
    """Make the first step of argument resolution load plugins, which many entries of SGLang load later or never.

    ``import sglang`` calls every platform entry point, in every process. This one returns None, as it is no platform.
    """
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_deprecated_dp_attention")(_load_plugins_first)


def _load_plugins_first(server_args: Any, previous: Callable[[Any], None]) -> None:
    from sglang.srt.plugins import load_plugins

    load_plugins()
    previous(server_args)


def register() -> None:
    """Register the hooks that run before a serving plan exists, once per process."""
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
    from sglang_dflash.upstream.names import HookRegistry

    return any(hook.__module__ == "sglang_dflash.enter" for _, hook, _ in HookRegistry._hooks.get(CREATE_WORKER, ()))


def _register_hooks() -> None:
    from sglang_dflash import enter
    from sglang_dflash.launch import resolution
    from sglang_dflash.upstream import hooks
    from sglang_dflash.upstream.names import register_resolution_hook

    hooks.register(enter.HOOKS)
    register_resolution_hook("handle_model_source_paths")(resolution.after_model_paths)
    register_resolution_hook("handle_speculative_decoding")(resolution.around_speculation)


def _refuse_dflash(error: Exception) -> None:
    # before weights load, without the imports that may have failed
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def refuse_arguments(server_args: Any, previous: Callable[[Any], None]) -> None:
        previous(server_args)
        if str(server_args.speculative_algorithm).upper() != "DFLASH":
            return
        if os.environ.get(SWITCH) == BUILTIN:
            left = "DFLASH is served by SGLang's own worker, not by sglang-dflash: %s=%s. %s"
            logger.warning(left, SWITCH, BUILTIN, misfit(error).problem)
            return
        check_version()
        raise misfit(error) from error

    def refuse_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
        if algorithm.is_dflash() and os.environ.get(SWITCH) != BUILTIN:
            raise misfit(error) from error
        return original(algorithm, server_args)

    HookRegistry.register(CREATE_WORKER, refuse_worker, HookType.AROUND)
    register_resolution_hook("handle_model_source_paths")(refuse_arguments)
