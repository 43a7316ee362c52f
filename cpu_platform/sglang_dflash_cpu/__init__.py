"""SGLang's platform for machines without an accelerator, in plain torch.

Entry points ``dflash_cpu``: the platform (group ``sglang.srt.platforms``) and its replacements
(``sglang.srt.plugins``).
"""

from __future__ import annotations

from typing import Any

from sglang_dflash_cpu.discovery import activate, is_active
from sglang_dflash_cpu.layers import ATTENTION_BACKEND

__all__ = ["activate", "install", "is_active", "register"]


def register() -> None:
    """Install the platform, if it is active, after the hooks of sglang-dflash."""
    from sglang_dflash import plugin

    plugin.register()
    if is_active():
        install()


def install() -> None:
    from sglang_dflash.ops import replace_on_host
    from sglang_dflash_cpu import arguments, replacements
    from sglang_dflash_cpu.layers import conv, dense, step_ops

    choices = step_ops.leading_tokens, step_ops.likeliest_tokens, step_ops.walk_candidates
    for function in (step_ops.match_copies, step_ops.take_copies, *choices, dense.linear, conv.gdn_convolve):
        replace_on_host(function.__name__, function)
    register_attention()
    replacements.install()
    arguments.install()


def create_attention(runner: Any) -> Any:
    from sglang.srt.runtime_context import get_exec

    from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend
    from sglang_dflash_cpu.replacements import complete_models

    complete_models()
    deterministic = get_exec().deterministic.enable_deterministic_inference
    return TorchAttentionBackend(runner, by_row=deterministic and not runner.is_draft_worker)


def register_attention() -> None:
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        DRAFT_ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_deterministic_attention_backend_choices,
        add_draft_attention_backend_choices,
        add_radix_supported_deterministic_attention_backend_choices,
    )
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(ATTENTION_BACKEND)(create_attention)
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        add_deterministic_attention_backend_choices([ATTENTION_BACKEND])
        add_radix_supported_deterministic_attention_backend_choices([ATTENTION_BACKEND])
