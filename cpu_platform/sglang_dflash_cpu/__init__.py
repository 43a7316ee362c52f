"""The torch-native CPU platform of SGLang.

SGLang finds two entry points called ``dflash_cpu``: the platform itself (group ``sglang.srt.platforms``) and what it
replaces in SGLang (group ``sglang.srt.plugins``).
"""

from __future__ import annotations

from sglang_dflash_cpu.discovery import activate, is_active

__all__ = ["activate", "install", "is_active", "register"]


def register() -> None:
    """Install the platform in a process that serves on it, after the hooks of sglang-dflash."""
    from sglang_dflash import plugin

    plugin.register()
    if is_active():
        install()


def install() -> None:
    """Install the platform's replacements, attention backend and argument handling; once per process."""
    from sglang_dflash.ops.dispatch import replace_on_host
    from sglang_dflash.upstream import platform_symbols
    from sglang_dflash_cpu import replacements
    from sglang_dflash_cpu.arguments import resolution_steps
    from sglang_dflash_cpu.layers import attention_registry, copies, dense

    for function in (copies.note_tokens, copies.find_copies, copies.offer_copies, dense.argmax, dense.linear):
        replace_on_host(function.__name__, function)
    platform_symbols.extend(row.target for row in replacements.TABLE)
    attention_registry.register()
    replacements.install()
    resolution_steps.install()
