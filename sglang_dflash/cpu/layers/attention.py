"""The attention backend ``torch_dflash``: its name, and its registration with SGLang."""

from __future__ import annotations

from typing import Any

NAME = "torch_dflash"


def create(runner: Any) -> Any:
    """The backend of one model runner; called by SGLang's attention registry."""
    from sglang_dflash.cpu.layers.attention_backend import TorchAttentionBackend

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

    register_attention_backend(NAME)(create)
    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    if NAME not in DRAFT_ATTENTION_BACKEND_CHOICES:
        add_draft_attention_backend_choices([NAME])
