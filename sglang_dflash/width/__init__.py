"""Choose each step's block width on the host, before the step, from the results of earlier steps."""

from __future__ import annotations

from sglang_dflash.width.adaptive import AdaptiveWidth
from sglang_dflash.width.config import WidthConfig, asked_for, build_policy, default_widths, parse_config, read_config
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
    "WidthConfig",
    "WidthPolicy",
    "asked_for",
    "build_policy",
    "default_widths",
    "parse_config",
    "read_config",
]
