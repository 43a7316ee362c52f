"""``--speculative-adaptive-config``: a JSON file with the policy and the widths that it may use."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError

FLAG = "--speculative-adaptive-config"
POLICIES = ("adaptive", "random", "fixed")


@dataclass(frozen=True)
class WidthConfig:
    """Settings of the file; every key is optional.

    Args:
        policy: ``adaptive``; ``random``, for recordings and tests; ``fixed``, always the full block.
        widths: ascending widths to choose from; empty for 1, 2, 4, ... and the block size.
        seed: for ``random``.
        copies: whether blocks are copied from what a request repeats; None for yes if the policy is ``adaptive``.
    """

    policy: str = "adaptive"
    widths: tuple[int, ...] = ()
    seed: int = 0
    copies: bool | None = None

    def widths_for(self, block_size: int, drafted: int | None = None) -> tuple[int, ...]:
        """Return the widths, ascending.

        Args:
            block_size: positions of the widest block.
            drafted: those that the drafter drafts, if fewer.

        Raises:
            DFlashError: a width exceeds the block size.
        """
        if not self.widths:
            return default_widths(block_size, drafted)
        if self.widths[-1] > block_size:
            raise DFlashError(
                f"width {self.widths[-1]} in the file of {FLAG}",
                expected=f"widths up to the block size, {block_size}",
                remedy="leave it out, or raise --speculative-num-draft-tokens if the drafter has a larger block",
            )
        return self.widths


def default_widths(block_size: int, drafted: int | None = None) -> tuple[int, ...]:
    """Return the powers of two below the block size, what the drafter drafts, and the block size."""
    powers = {1 << exponent for exponent in range(block_size.bit_length())}
    return tuple(
        sorted({*(width for width in powers if width < block_size), min(drafted or block_size, block_size), block_size})
    )


def read_config(path: str | None) -> WidthConfig:
    """Read the file; without one, return the defaults.

    Raises:
        DFlashError: the file is missing or not a JSON object, or as :func:`parse_config`.
    """
    if path is None:
        return WidthConfig()
    try:
        found = read_object(Path(path))
    except DFlashError as error:
        raise _refusal(
            error.value, 'a JSON object, such as {"policy": "adaptive"}', "write one, or leave the flag out"
        ) from None
    return parse_config(found)


def parse_config(found: dict[str, Any]) -> WidthConfig:
    """Check a JSON object and return its settings.

    Raises:
        DFlashError: an unknown key, or a value that its key does not take.
    """
    keys = [field.name for field in fields(WidthConfig)]
    for key, value in found.items():
        if key == "ragged":
            raise _refusal(
                'key "ragged": requests are no longer cut inside a batch',
                f"the keys {', '.join(keys)}",
                "leave it out: every request of a step verifies the same width",
            )
        if key.isdigit():
            raise _refusal(
                f"{_short(key)}: a batch size, as in SGLang's own format",
                f"the keys {', '.join(keys)}",
                'list the widths, such as {"widths": [1, 2, 4, 8, 16]} (a width is SGLang\'s steps plus 1); which one '
                "is used at which batch size is measured",
            )
        if key not in keys:
            raise _refusal(f"key {_short(key)}", f"the keys {', '.join(keys)}", "correct it, or leave it out")
        problem = _problem(key, value)
        if problem:
            raise _refusal(f"{key}: {_short(value)}", problem, "correct it, or leave it out")
    widths = tuple(sorted(set(found.get("widths", ()))))
    return WidthConfig(**{**found, "widths": widths})


def _problem(key: str, value: Any) -> str | None:
    """Return what was expected; None if the value is good."""
    if key == "policy":
        return None if value in POLICIES else f"one of {', '.join(POLICIES)}"
    if key == "seed":
        return None if _is_int(value) else "an integer"
    if key == "copies":
        return None if isinstance(value, bool) else "true or false"
    good = isinstance(value, list) and value and all(_is_int(width) and width >= 1 for width in value)
    return None if good else "a list of widths, each at least 1"


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _short(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:
        text = "lists in lists"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refusal(value: str, expected: str, remedy: str) -> DFlashError:
    return DFlashError(f"{FLAG}: {value}", expected=expected, remedy=remedy)
