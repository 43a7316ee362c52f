"""A serving plan for code that reads one."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_dflash.drafter.checkpoint import ModelFiles
from sglang_dflash.drafter.config import DrafterConfig
from sglang_dflash.plan import serving
from sglang_dflash.plan.advice import Load
from sglang_dflash.plan.flags import parse
from sglang_dflash.plan.machine import GPUS, Machine
from sglang_dflash.plan.memory import MemoryTable
from sglang_dflash.plan.report import Report, preflight
from sglang_dflash.plan.serving import ServingPlan
from tests.support.cards import FOLDER
from tests.support.configs import drafter


def made(**changes: Any) -> ServingPlan:
    """A fixed block of 8, no draft window, states kept."""
    plan: dict[str, Any] = {
        "files": ModelFiles("drafter"),
        "drafter": DrafterConfig.from_dict(drafter()),
        "block": 8,
        "widths": None,
        "window": None,
        "replay": False,
        "records": 0,
        "copies": False,
        "overlap": True,
        "role": "null",
    }
    return ServingPlan(**{**plan, **changes})


def serve(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Let our worker serve such a plan in this process."""
    monkeypatch.setattr(serving, "plan", made(**changes))


def serve_builtin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let SGLang's own worker serve."""
    monkeypatch.setattr(serving, "plan", None)


def card_pair(name: str) -> dict[str, str]:
    """A published pair's configurations, without weights."""
    return {model: str(FOLDER / name / model) for model in ("target", "drafter")}


def checked(name: str, *flags: str, on: Machine = GPUS["h200"], load: Load | None = None) -> Report:
    """What ``check`` reports of a published pair with these flags."""
    return preflight(parse(flags, **card_pair(name))[0], on, load)


def memory_of(name: str, *flags: str, on: Machine = GPUS["h200"]) -> MemoryTable:
    memory = checked(name, *flags, on=on).memory
    assert memory is not None
    return memory
