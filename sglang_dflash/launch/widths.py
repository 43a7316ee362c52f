"""The widths of a block, and the file of ``--speculative-adaptive-config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError, Finding, error, first_problem
from sglang_dflash.launch.settings import COPIES_SWITCH

if TYPE_CHECKING:
    from sglang_dflash.launch.asked import Launch

FLAG = "--speculative-adaptive-config"
_Width = Annotated[int, Field(ge=1)]
_Widths = Annotated[
    tuple[_Width, ...], Field(strict=False, min_length=1), AfterValidator(lambda found: tuple(sorted(set(found))))
]


@dataclass(frozen=True, config=ConfigDict(strict=True, extra="forbid"))
class WidthConfig:
    """The file.

    Attributes:
        widths: empty for the powers of two, 12 if 16 can be drafted, and the block sizes of drafter and server.
    """

    widths: _Widths = ()

    def widths_for(self, block_size: int, drafter_block: int | None = None) -> tuple[int, ...]:
        """Return the widths, ascending; one that exceeds the block size is a DFlashError."""
        if not self.widths:
            powers = {1 << exponent for exponent in range(block_size.bit_length())}
            drafted = min(drafter_block or block_size, block_size)
            return tuple(sorted({*powers, *((12,) if drafted >= 16 else ()), drafted, block_size}))
        if self.widths[-1] > block_size:
            raise DFlashError(
                f"width {self.widths[-1]} in the file of {FLAG} exceeds the block size {block_size}",
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
        remedy = 'write a JSON object, such as {"widths": [1, 8, 16]}, or leave the flag out'
        raise DFlashError(f"{FLAG}: {error.problem}", remedy=remedy) from None
    return parse_config(found)


def parse_config(found: dict[str, Any]) -> WidthConfig:
    """Errors as in :func:`read_config`."""
    try:
        return WidthConfig(**found)
    except ValidationError as error:
        key, expected = first_problem(error)
    remedy = "correct it, or leave it out"
    if key not in vars(WidthConfig()):
        expected = "left out, as the only key is widths"
    if key.isdigit():  # as in SGLang's own format
        remedy = (
            'list the widths, such as {"widths": [1, 2, 4, 8, 16]} (a width is SGLang\'s steps plus 1); the server '
            "measures which one is the fastest at each batch size"
        )
    raise DFlashError(f"{FLAG}: {key} is {json.dumps(found[key])} and should be {expected}", remedy=remedy)


def check_widths(launch: Launch) -> Iterator[Finding]:
    """And that something drafts."""
    file = launch.settings.speculative_adaptive_config
    if launch.widths is not None:
        launch.widths.widths_for(launch.block, launch.drafter.block_size)
    elif file is not None:
        yield error(
            f"{FLAG} {file} without --speculative-adaptive", remedy="add --speculative-adaptive, or leave the file out"
        )
    if not (launch.has_drafter or launch.copies):
        yield error(
            "nothing drafts: there is no drafter, and blocks are not copied",
            remedy=f"set --speculative-draft-model-path, or unset {COPIES_SWITCH}",
        )
