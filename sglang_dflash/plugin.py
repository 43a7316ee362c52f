"""Entry point ``sglang.srt.plugins: dflash``: registers our hooks with SGLang, does no work of its own.

SGLang's loader catches and logs whatever a plugin raises, so nothing that can fail for a user's reason happens here:
versions, flags and pairs are checked where an exception still stops the server (flag resolution, worker construction).
"""

from __future__ import annotations

from sglang_dflash.cpu import is_active

_registered = False


def register() -> None:
    """Register every hook; a second call in one process does nothing."""
    global _registered
    if _registered:
        return
    _registered = True
    if is_active():
        from sglang_dflash.cpu import install

        install()
