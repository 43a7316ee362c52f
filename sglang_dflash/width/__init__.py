"""Choose each step's block width on the host, before the step, from the results of earlier steps."""

from __future__ import annotations

from sglang_dflash.width.adaptive import AdaptiveWidth, build_policy
from sglang_dflash.width.costs import CostTable
from sglang_dflash.width.policy import FixedWidth, Prospect, RandomWidth, WidthPolicy
from sglang_dflash.width.survival import Survival

__all__ = [
    "AdaptiveWidth",
    "CostTable",
    "FixedWidth",
    "Prospect",
    "RandomWidth",
    "Survival",
    "WidthPolicy",
    "build_policy",
]
