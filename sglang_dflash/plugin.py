"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's loader catches and logs whatever a plugin raises, so nothing that can fail for a user's reason happens here:
versions, flags and pairs are checked where an exception still stops the server (flag resolution, worker construction).
"""

from __future__ import annotations


def register() -> None:
    """Register every hook; safe to call again, in any process."""
    from sglang_dflash.cpu import is_active
    from sglang_dflash.cpu.replacements import install

    if is_active():
        install()
