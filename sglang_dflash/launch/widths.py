"""The widths of a block, and the file of ``--speculative-adaptive-config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError, Finding, error

if TYPE_CHECKING:
    from sglang_dflash.launch.asked import Launch

FLAG = "--speculative-adaptive-config"
_FORM = 'write {"widths": [1, 2, 4, 8, 16]}'


@dataclass(frozen=True)
class WidthConfig:
    """The file.

    Attributes:
        widths: ascending; empty for the powers of two, 12 if 16 can be drafted, and the block sizes of drafter and
            server.
    """

    widths: tuple[int, ...] = ()

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
        return parse_config(read_object(Path(path)))
    except DFlashError as error:
        raise DFlashError(f"{FLAG}: {error.problem}", error.remedy) from None


def parse_config(found: dict[str, Any]) -> WidthConfig:
    for key in found.keys() - {"widths"}:
        sglangs = " (a width is SGLang's steps plus 1; the server measures which is the fastest at each batch size)"
        raise DFlashError(f"the key {key} is unknown", remedy=_FORM + sglangs * key.isdigit())
    widths = found.get("widths", ())
    are_widths = isinstance(widths, list) and all(type(width) is int and width >= 1 for width in widths)
    if found and not (widths and are_widths):
        raise DFlashError(f"widths is {json.dumps(widths)}, not a list of numbers from 1", remedy=_FORM)
    return WidthConfig(tuple(sorted({*widths})))


def check_widths(launch: Launch) -> Iterator[Finding]:
    file = launch.settings.speculative_adaptive_config
    if launch.widths is not None:
        launch.widths.widths_for(launch.block, launch.drafter.block_size)
    elif file is not None:
        yield error(
            f"{FLAG} {file} without --speculative-adaptive", remedy="add --speculative-adaptive, or leave the file out"
        )
