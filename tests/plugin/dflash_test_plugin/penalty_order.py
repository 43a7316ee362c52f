"""Mode ``penalty_order``: plain decoding without overlap applies penalties in the order that it has with overlap.

SGLang keeps its penalizers in a set of classes. Without overlap it applies them as that set happens to be iterated,
which differs between processes, and ``(l - a) / r`` is not ``l / r - a``. With overlap, and for a block (``repeat``),
those that add come before the one that scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def as_for_a_block_of_one(original: Callable[..., None], orchestrator: Any, logits: Tensor) -> None:
    original(orchestrator, logits, repeat=1)
