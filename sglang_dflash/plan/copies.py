"""Whether blocks are copied: the rule."""

from __future__ import annotations

import os

from sglang_dflash.errors import DFlashError
from sglang_dflash.width.config import FLAG, WidthConfig

SWITCH = "SGLANG_DFLASH_COPIES"


def copies_asked_for(widths: WidthConfig | None) -> bool:
    """Whether blocks are copied: as the switch or the width file says, else with adaptive widths.

    Raises:
        DFlashError: the switch holds an unknown word, or contradicts the file.
    """
    value, key = os.environ.get(SWITCH, ""), None if widths is None else widths.copies
    if value not in ("", "0", "1"):
        raise DFlashError(f"{SWITCH}={value!r}", expected="0, 1, or unset", remedy=f"unset {SWITCH}")
    if value and key not in (None, value == "1"):
        raise DFlashError(
            f'{SWITCH}={value} and "copies": {str(key).lower()} in the file of {FLAG}',
            expected="one of them",
            remedy=f"unset {SWITCH}",
        )
    if value or key is not None:
        return value == "1" or bool(key)
    return widths is not None and widths.policy == "adaptive"
