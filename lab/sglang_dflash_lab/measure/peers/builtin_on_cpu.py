"""What SGLang's own DFLASH worker lacks on the torch-native CPU platform, so that it can be measured beside ours.

A plugin of SGLang that is found by its folder being on the ``PYTHONPATH``, which ``sglang-dflash bench`` sets for the
``builtin`` arms only; it is no part of the package. Everything else that the builtin worker needs there (attention,
recurrent states, KV pool, allocation) it gets from the platform, the same code that serves our worker.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Entry point of group ``sglang.srt.plugins``; called in every process of the server."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.model_executor.model_runner.ModelRunner._extend_forward_kwargs",
        embeddings_in_the_models_dtype,
        HookType.AFTER,
    )
    HookRegistry.register("sglang.srt.models.dflash.DFlashAttention.__init__", rope_without_triton, HookType.AFTER)


def embeddings_in_the_models_dtype(kwargs: dict[str, Any], runner: Any, forward_batch: Any, *_: Any) -> dict[str, Any]:
    """The builtin drafter is fed embeddings, which the runner casts to bfloat16 whatever the model's dtype is."""
    if forward_batch.input_embeds is not None and forward_batch.replace_embeds is None:
        kwargs["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return kwargs


def rope_without_triton(_: None, attention: Any, *__: Any, **___: Any) -> None:
    """QK-norm and RoPE of a bfloat16 drafter are one Triton kernel, chosen without asking for the device."""
    attention.use_table_qk_norm_rope = False
