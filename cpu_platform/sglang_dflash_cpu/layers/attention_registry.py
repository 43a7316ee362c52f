"""Registration of our attention backend with SGLang."""

from __future__ import annotations

from typing import Any

from sglang_dflash_cpu.layers import ATTENTION_BACKEND


def create(runner: Any) -> Any:
    """The backend of one model runner; called by SGLang's attention registry."""
    from sglang_dflash_cpu.layers.attention_backend import TorchAttentionBackend

    return TorchAttentionBackend(runner)


def register() -> None:
    """Make the backend a choice for the target and for a drafter; a second call adds nothing."""
    from sglang_dflash.upstream import (
        ATTENTION_BACKEND_CHOICES,
        DRAFT_ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
        add_draft_attention_backend_choices,
        register_attention_backend,
    )

    register_attention_backend(ATTENTION_BACKEND)(create)
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])
    if ATTENTION_BACKEND not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([ATTENTION_BACKEND])
