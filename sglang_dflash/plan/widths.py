"""The widths of a block, the file of ``--speculative-adaptive-config``, and whether blocks are copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError, first_problem
from sglang_dflash.plan.settings import COPIES_SWITCH, Settings

if TYPE_CHECKING:
    pass

# once a GPU shows 0.98 of a fixed block's tokens per second with 1, 8 and 16 requests (docs/results/width.md)
ADAPTIVE_BY_DEFAULT = False
FLAG = "--speculative-adaptive-config"
_Width = Annotated[int, Field(ge=1)]
_Widths = Annotated[
    tuple[_Width, ...], Field(strict=False, min_length=1), AfterValidator(lambda found: tuple(sorted(set(found))))
]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WidthConfig:
    """Settings of the file; every key is optional.

    Attributes:
        policy: ``random`` is for recordings and tests; ``fixed`` is always the widest.
        widths: empty for the powers of two, 12 if 16 can be drafted, and the block sizes of drafter and server.
        copies: whether text that a request repeats is copied; by default if ``policy`` is ``adaptive``.
    """

    policy: Literal["adaptive", "random", "fixed"] = "adaptive"
    widths: _Widths = ()
    seed: int = 0
    copies: bool | None = None

    def widths_for(self, block_size: int, drafter_block: int | None = None) -> tuple[int, ...]:
        """Return the widths, ascending; one that exceeds the block size is a DFlashError."""
        if not self.widths:
            powers = {1 << exponent for exponent in range(block_size.bit_length())}
            drafted = min(drafter_block or block_size, block_size)
            return tuple(sorted({*powers, *((12,) if drafted >= 16 else ()), drafted, block_size}))
        if self.widths[-1] > block_size:
            raise DFlashError(
                f"width {self.widths[-1]} in the file of {FLAG}",
                expected=f"widths up to the block size, {block_size}",
                remedy="leave it out, or raise --speculative-num-draft-tokens if the drafter has a larger block",
            )
        return self.widths


def read_config(path: str | None) -> WidthConfig:
    """Read and check the file; return the defaults without one.

    Raises:
        DFlashError: no JSON object, an unknown key or an invalid value.
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
    """Errors as in :func:`read_config`."""
    try:
        return WidthConfig(**found)
    except ValidationError as error:
        key, expected = first_problem(error)
    remedy = "correct it, or leave it out"
    if key not in vars(WidthConfig()):
        expected = f"the keys {', '.join(vars(WidthConfig()))}"
    if key.isdigit():  # as in SGLang's own format
        remedy = (
            'list the widths, such as {"widths": [1, 2, 4, 8, 16]} (a width is SGLang\'s steps plus 1); the server '
            "measures which one is the fastest at each batch size"
        )
    raise DFlashError(f"{FLAG}: {key}: {json.dumps(found[key])}", expected=expected, remedy=remedy)


def chooses_copies(settings: Settings, widths: WidthConfig | None) -> bool:
    """By the switch or the width file, otherwise with adaptive widths; DFlashError for a contradiction."""
    switch, key = settings.variable(COPIES_SWITCH), None if widths is None else widths.copies
    if switch and key not in (None, switch == "1"):
        raise DFlashError(
            f'{COPIES_SWITCH}={switch} and "copies": {str(key).lower()} in the file of {FLAG}',
            expected="one of them",
            remedy=f"unset {COPIES_SWITCH}",
        )
    if switch or key is not None:
        return switch == "1" or bool(key)
    return widths is not None and widths.policy == "adaptive"
