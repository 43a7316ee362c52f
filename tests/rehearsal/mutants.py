"""Planted bugs, as negative controls: REHEARSE_MUTANT names one, and some check must notice it."""

from __future__ import annotations

import os

VARIABLE = "REHEARSE_MUTANT"


def install() -> None:
    assert not os.environ.get(VARIABLE)
