"""An SGLang plugin that gives plain decoding without overlap the order of penalties that it has with overlap.

SGLang keeps its penalizers in a set of classes. Without overlap it applies them as that set happens to be iterated,
which differs between processes, and ``(l - a) / r`` is not ``l / r - a``. With overlap, and for a block (``repeat``),
those that add come before the one that scales. A server finds the plugin when this folder is on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

APPLY = "sglang.srt.sampling.penaltylib.orchestrator.BatchedPenalizerOrchestrator.apply"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(APPLY, as_for_a_block_of_one, HookType.AROUND)


def as_for_a_block_of_one(original: Callable[..., None], orchestrator: Any, logits: Tensor) -> None:
    original(orchestrator, logits, repeat=1)
