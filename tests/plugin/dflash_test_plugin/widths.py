"""Every step another width, as a policy may ask for: ``SGLANG_DFLASH_TEST_WIDTHS`` lists them, "," or "." between."""

from __future__ import annotations

import itertools
import os
from typing import Any

_widths = itertools.cycle(
    int(width) for width in os.environ.get("SGLANG_DFLASH_TEST_WIDTHS", "1").replace(".", ",").split(",")
)


def in_turn(result: int, policy: Any, *_: Any) -> int:
    """After ``FixedWidth.width``."""
    return min(next(_widths), result)
