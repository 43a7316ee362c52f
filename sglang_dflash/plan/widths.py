"""``--speculative-adaptive-config``: a JSON file with the policy and the widths that it may choose."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError

FLAG = "--speculative-adaptive-config"
POLICIES = ("adaptive", "random", "fixed")


@dataclass(frozen=True)
class WidthConfig:
    """Settings of the file; every key is optional.

    Attributes:
        policy: ``adaptive``; ``random``, for recordings and tests; ``fixed``, always the widest.
        widths: ascending; empty for the powers of two and the block sizes of drafter and server.
        seed: for ``random``.
        copies: whether blocks are copied from text that a request repeats; None for yes if ``policy`` is ``adaptive``.
    """

    policy: str = "adaptive"
    widths: tuple[int, ...] = ()
    seed: int = 0
    copies: bool | None = None

    def widths_for(self, block_size: int, drafter_block: int | None = None) -> tuple[int, ...]:
        """Return the widths, ascending; one that exceeds the block size is a DFlashError.

        Args:
            block_size: positions of the widest block.
            drafter_block: those that the drafter drafts, if fewer.
        """
        if not self.widths:
            powers = {1 << exponent for exponent in range(block_size.bit_length())}
            return tuple(sorted({*powers, min(drafter_block or block_size, block_size), block_size}))
        if self.widths[-1] > block_size:
            raise DFlashError(
                f"width {self.widths[-1]} in the file of {FLAG}",
                expected=f"widths up to the block size, {block_size}",
                remedy="leave it out, or raise --speculative-num-draft-tokens if the drafter has a larger block",
            )
        return self.widths


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_widths(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_int(width) and width >= 1 for width in value)


# Key -> what it accepts, in words and as a test.
_KEYS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "policy": (f"one of {', '.join(POLICIES)}", lambda value: value in POLICIES),
    "widths": ("a list of widths, each at least 1", _are_widths),
    "seed": ("an integer", _is_int),
    "copies": ("true or false", lambda value: isinstance(value, bool)),
}


def read_config(path: str | None) -> WidthConfig:
    """Read and check the file; return the defaults without one.

    Raises:
        DFlashError: the file is missing or not a JSON object; an unknown key, or a value that its key does not accept.
    """
    if path is None:
        return WidthConfig()
    try:
        found = read_object(Path(path))
    except DFlashError as error:
        expected, remedy = 'a JSON object, such as {"policy": "adaptive"}', "write one, or leave the flag out"
        raise DFlashError(f"{FLAG}: {error.value}", expected=expected, remedy=remedy) from None
    return parse_config(found)


def parse_config(found: dict[str, Any]) -> WidthConfig:
    """Check a JSON object and return its settings; raise as :func:`read_config` does."""
    for key, value in found.items():
        problem, remedy = f"{key}: {json.dumps(value)}", "correct it, or leave it out"
        expected, accepts = _KEYS.get(key, (f"the keys {', '.join(_KEYS)}", None))
        if key.isdigit():
            problem = f"{json.dumps(key)}: a batch size, as in SGLang's own format"
            remedy = (
                'list the widths, such as {"widths": [1, 2, 4, 8, 16]} (a width is SGLang\'s steps plus 1); the server '
                "measures which one is the fastest at each batch size"
            )
        elif accepts is None:
            problem = f"key {json.dumps(key)}"
        elif accepts(value):
            continue
        raise DFlashError(f"{FLAG}: {problem}", expected=expected, remedy=remedy)
    return WidthConfig(**{**found, "widths": tuple(sorted(set(found.get("widths", ()))))})
