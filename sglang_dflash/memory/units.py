"""Bytes as a person reads them."""

from __future__ import annotations

MIB = 1 << 20
GIB = 1 << 30


def size(count: float) -> str:
    """``"2.27 GiB"``, ``"41.0 MiB"``, ``"20.0 KiB"``; nothing for none."""
    if count >= GIB:
        return f"{count / GIB:.2f} GiB"
    if count >= MIB:
        return f"{count / MIB:.1f} MiB"
    return f"{count / 1024:.1f} KiB" if count else ""
