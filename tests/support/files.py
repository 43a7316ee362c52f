"""Configurations of the models in a folder, and the error of findings."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.errors import DFlashError, Finding


def load_config(folder: str | Path) -> dict[str, Any]:
    return ModelFiles(str(folder)).published


def load_drafter(folder: str | Path) -> DrafterConfig:
    return DrafterConfig.from_dict(load_config(folder))


def raise_first_error(findings: Iterable[Finding]) -> None:
    for finding in findings:
        if finding.level == "error":
            raise DFlashError(finding.value, finding.remedy)
