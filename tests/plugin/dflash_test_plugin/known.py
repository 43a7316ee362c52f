"""What the mode ``oracle`` makes of a block, for tests that count its steps."""

from __future__ import annotations

import random


def right_drafts(anchor: int, width: int) -> int:
    """Return how many drafts after position ``anchor`` are right: 0 to ``width - 1``."""
    return random.Random(anchor).randrange(width)
