"""Requests of trainers that are refused, with the reason for the client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.formats import ARCHITECTURES, architecture
from sglang_dflash.errors import DFlashError
from sglang_dflash.upstream.hooks import Hooks


def refused_folder(path: str) -> str | None:
    """Return why ``/update_weights_from_disk`` refuses this folder, or None.

    The target's loader would skip every tensor of a drafter, and report success.
    """
    try:
        if architecture(ModelFiles(path).config) not in ARCHITECTURES:
            return None
    except DFlashError:
        return None
    return (
        f"{path} is a drafter, and a folder updates the target. Send the drafter's tensors with selector draft to "
        "/update_weights_from_tensor, or restart the server with this drafter"
    )


async def raise_refusal(_: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> None:
    """Hook around ``TokenizerManager.resume_memory_occupation``: turn a refusal into a 400."""
    manager.auto_create_handle_loop()
    for answer in await manager.resume_memory_occupation_communicator(obj):
        if answer.rid is not None:
            raise ValueError(answer.rid)


_TOKENIZER = "managers.tokenizer_manager.TokenizerManager"
TOKENIZER_HOOKS = Hooks(around={f"{_TOKENIZER}.resume_memory_occupation": raise_refusal})
