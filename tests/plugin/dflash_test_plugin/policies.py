"""Modes that replace the adaptive policy: every width in turn, without times of steps."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_dflash.width import WidthPolicy


class RandomWidth(WidthPolicy):
    """A width drawn uniformly for each step."""

    def __init__(self, *widths: int, seed: int = 3) -> None:
        super().__init__(*widths)
        self._random = Random(seed)

    def width(self, batch_size: int, matches: Sequence[int] = ()) -> int:
        return self._random.choice(self.widths)

    def state_hash(self) -> int:
        return hash(self._random.getstate()[1])

    def describe(self) -> dict[str, Any]:
        return {"policy": "random", "widths": list(self.widths)}


def random_width() -> None:
    _replace(lambda widths: RandomWidth(*widths))


def widest() -> None:
    _replace(lambda widths: WidthPolicy(widths[-1]))


def _replace(policy: Any) -> None:
    def build(original: Any, plan: Any, widths: tuple[int, ...], *arguments: Any) -> WidthPolicy:
        prefills = plan.role == "prefill"
        return original(plan, widths, *arguments) if prefills else policy(widths)  # type: ignore[no-any-return]

    HookRegistry.register("sglang_dflash.worker.start.calibration.width_policy", build, HookType.AROUND)
