"""Tiny trained target + drafter pairs: real accept lengths on any machine.

This module needs no PyTorch: it only says where the shipped weights are.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.errors import DFlashError

NAMES = ("tiny-hybrid", "tiny-moe", "tiny-dense")
DRAFTER_KINDS = ("good", "weak", "swa", "interleaved", "mismatched")
WEIGHTS = Path(__file__).parent / "weights"


def target_path(name: str) -> Path:
    """The folder of the named pair's target: config, bf16 safetensors, tokenizer.

    Raises:
        DFlashError: no such pair.
    """
    if name not in NAMES:
        raise DFlashError(
            f"pair {name!r}", expected=f"one of {', '.join(NAMES)}", remedy="see `sglang-dflash pairs list`"
        )
    return WEIGHTS / name / "target"


def drafter_path(name: str, kind: str = "good") -> Path:
    """The folder of the named pair's drafter of that kind: config and bf16 safetensors.

    Raises:
        DFlashError: no such pair, or the pair has no such drafter.
    """
    kinds = drafter_kinds(name)
    if kind not in kinds:
        raise DFlashError(
            f"drafter {kind!r} of {name}",
            expected=f"one of {', '.join(kinds)}",
            remedy="see `sglang-dflash pairs list`",
        )
    return WEIGHTS / name / f"drafter-{kind}"


def drafter_kinds(name: str) -> tuple[str, ...]:
    """The kinds of drafter that the named pair has; `good` is the first."""
    target_path(name)
    return DRAFTER_KINDS if name == "tiny-hybrid" else DRAFTER_KINDS[:1]
