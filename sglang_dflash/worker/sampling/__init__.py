"""The target's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_dflash.upstream.worker import ScheduleBatch


def fresh_rows(batch: ScheduleBatch) -> list[int]:
    """Return the indices of the requests that a prefill starts; those of a mixed batch that decode were started."""
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    return [i for i, req in enumerate(batch.reqs) if id(req) not in decoding]
