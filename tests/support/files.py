"""Configurations of the models in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig


def load_config(folder: str | Path) -> dict[str, Any]:
    return ModelFiles(str(folder)).published


def load_drafter(folder: str | Path) -> DrafterConfig:
    return DrafterConfig.from_dict(load_config(folder))
