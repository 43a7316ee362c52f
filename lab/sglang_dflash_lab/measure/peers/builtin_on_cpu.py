"""An SGLang plugin that lets SGLang's own DFLASH worker run on the CPU platform, for comparisons.

It is active if its folder is on the ``PYTHONPATH`` of a ``builtin`` arm's server.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_dflash.launch import which_worker

    which_worker.served_by_neither = lambda *_: iter(())
    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        embeddings_in_the_models_dtype,
        HookType.AFTER,
    )
    HookRegistry.register("sglang.srt.models.dflash.DFlashAttention.__init__", rope_without_triton, HookType.AFTER)


def embeddings_in_the_models_dtype(kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any) -> dict[str, Any]:
    """Undo the runner's cast of the drafter's input embeddings to bfloat16."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return kwargs


def rope_without_triton(_: None, attention: Any, *__: Any, **___: Any) -> None:
    """Disable the Triton kernel for QK-norm and RoPE, which SGLang selects on every device."""
    attention.use_table_qk_norm_rope = False
