"""How wide the next block is: a host-side decision, made before each step from what earlier steps brought."""

from __future__ import annotations

from sglang_dflash.width.policy import FixedWidth, WidthPolicy

__all__ = ["FixedWidth", "WidthPolicy"]
