"""The torch-native CPU platform: entry point ``sglang.srt.platforms: dflash_cpu``."""

from __future__ import annotations

from sglang_dflash.cpu.discovery import activate, is_active

__all__ = ["activate", "install", "is_active"]


def install() -> None:
    """Put the platform's stand-ins, attention backend and argument handling in place; once a process."""
    from sglang_dflash.cpu import replacements
    from sglang_dflash.cpu.arguments import resolution_steps
    from sglang_dflash.cpu.layers import attention_registry

    attention_registry.register()
    replacements.install()
    resolution_steps.install()
