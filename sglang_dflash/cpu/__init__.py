"""The torch-native CPU platform: entry point ``sglang.srt.platforms: dflash_cpu``."""

from __future__ import annotations

from sglang_dflash.cpu.activation import activate, is_active

__all__ = ["activate", "is_active"]
