"""Whether blocks are copied: the rule, and the size of the histories."""

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


def history_columns(context: int, tokens: int, width: int) -> int:
    """Columns of the histories: no request grows longer than the context, or than the K/V pool.

    The step after the one that ends a request is already under way: two blocks may lie beyond. One column is for what
    lies beyond all of that.

    Args:
        context: tokens of the longest request.
        tokens: of the K/V pool.
        width: positions of the widest block.
    """
    return min(context, tokens) + 2 * width + 2
