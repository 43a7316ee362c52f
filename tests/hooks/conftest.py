"""The hooks of streamed answers, applied as the plugin registers them."""

from __future__ import annotations

import pkgutil
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace as Some

import pytest


@pytest.fixture(scope="module")
def serve() -> Iterator[Callable[..., None]]:
    """Apply the hooks; the returned function sets whether our worker serves here, and SGLang's tokenizer."""
    from sglang.srt.arg_groups import resolution_hooks
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.plugins.hook_registry import HookRegistry, _wrap_fn

    from sglang_dflash import plugin, upstream
    from sglang_dflash.hooks import streams
    from sglang_dflash.plan.serving import ServingPlan

    args, plan = Some(), ServingPlan.__new__(ServingPlan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HookRegistry, "_hooks", defaultdict(list))
        patch.setattr(resolution_hooks, "_HOOKS", {})
        patch.setattr(TokenizerManager, "init_tokenizer_and_processor", lambda _: None)
        plugin._register_hooks()
        for path, [(how, hook, _), *_] in HookRegistry._hooks.items():
            if hook.__module__ == streams.__name__:
                patch.setattr(path, _wrap_fn(pkgutil.resolve_name(path), hook, how))
        patch.setattr(streams, "get_server_args", lambda: args)

        def serve(ours: bool, tokenizer: object = None) -> None:
            upstream.write_record(args, plan if ours else "SGLang's own worker serves")
            TokenizerManager.init_tokenizer_and_processor(Some(tokenizer=tokenizer))

        yield serve
