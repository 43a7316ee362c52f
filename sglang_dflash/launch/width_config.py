"""The widths of a block, and the file of ``--speculative-adaptive-config``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.drafter.checkpoint import read_object
from sglang_dflash.errors import DFlashError, Finding, error

if TYPE_CHECKING:
    from sglang_dflash.launch.launch import Launch

FLAG = "--speculative-adaptive-config"


def widths_for(listed: tuple[int, ...], block_size: int, drafter_block: int | None = None) -> tuple[int, ...]:
    """Return the widths, ascending; one that exceeds the block size is a DFlashError.

    Without ``listed`` ones: the powers of two, 12 if 16 can be drafted, and the block sizes of drafter and server.
    """
    if not listed:
        powers = {1 << exponent for exponent in range(block_size.bit_length())}
        drafter_width = min(drafter_block or block_size, block_size)
        return tuple(sorted({*powers, *((12,) if drafter_width >= 16 else ()), drafter_width, block_size}))
    if listed[-1] > block_size:
        raise DFlashError(
            f"width {listed[-1]} in the file of {FLAG} exceeds the block size {block_size}",
            remedy="leave it out, or raise --speculative-num-draft-tokens if the drafter has a larger block",
        )
    return listed


def read_config(path: str | None) -> tuple[int, ...]:
    """Return the widths in the file, ascending; empty without a file or its key.

    Raises:
        DFlashError: no JSON object, an unknown key or an invalid value.
    """
    if path is None:
        return ()
    try:
        problem = _problem(found := read_object(Path(path)))
    except DFlashError as error:
        problem = error.problem
    if problem:
        raise DFlashError(f"{FLAG}: {problem}", remedy='write {"widths": [1, 2, 4, 8, 16]}, or leave the flag out')
    return tuple(sorted({*found.get("widths", ())}))


def _problem(found: dict[str, Any]) -> str | None:
    for key in found.keys() - {"widths"}:
        sglangs = ": a width is SGLang's steps plus 1, and the server measures which is the fastest at each batch size"
        return f"the key {key} is unknown" + sglangs * key.isdigit()
    widths = found.get("widths", [1])
    if widths and isinstance(widths, list) and all(type(width) is int and width >= 1 for width in widths):
        return None
    return f"widths is {json.dumps(widths)}, not a list of numbers from 1"


def check_widths(launch: Launch) -> Iterator[Finding]:
    file = launch.settings.speculative_adaptive_config
    if launch.widths is not None:
        widths_for(launch.widths, launch.block, launch.drafter.block_size)
    elif file is not None:
        yield error(
            f"{FLAG} {file} without --speculative-adaptive", remedy="add --speculative-adaptive, or leave the file out"
        )
