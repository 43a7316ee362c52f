"""Tiny trained pairs of target and drafter. This package needs no PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.pairs.noisy import noisy_path

NAMES = ("tiny-hybrid", "tiny-moe", "tiny-dense", "tiny-forks")
DRAFTER_KINDS = {
    "tiny-hybrid": ("good", "weak", "swa", "interleaved", "mismatched", "dflash2"),
    "tiny-forks": ("good", "dflash2"),
}
NOISY = "noisy"  # every pair has it; noisy.py generates it
WEIGHTS = Path(__file__).parent / "weights"


def target_path(name: str) -> Path:
    """Return the folder of the pair's target: config, bf16 safetensors, tokenizer; an unknown pair is a DFlashError."""
    check_known("pair", name, NAMES)
    return WEIGHTS / name / "target"


def drafter_path(name: str, kind: str = "good") -> Path:
    """Return the folder of the pair's drafter of that kind: config and bf16 safetensors.

    Raises:
        DFlashError: no such pair or drafter, or ``noisy`` cannot be written.
    """
    check_known(f"drafter of {name}", kind, (*drafter_kinds(name), NOISY))
    if kind == NOISY:
        return noisy_path(drafter_path(name))
    return WEIGHTS / name / f"drafter-{kind}"


def drafter_kinds(name: str) -> tuple[str, ...]:
    """Return the kinds of drafter that the pair ships, ``good`` first."""
    check_known("pair", name, NAMES)
    return DRAFTER_KINDS.get(name, ("good",))


def check_known(what: str, value: str, known: Sequence[str]) -> None:
    """Raise a DFlashError about ``what`` if ``value`` is not in ``known``."""
    if value not in known:
        raise DFlashError(f"{what} {value!r} is unknown", remedy=f"choose one of {', '.join(known)}")
