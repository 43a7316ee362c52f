"""What the worker keeps per request, a row of the target's request pool each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from sglang_dflash.upstream import ScheduleBatch
    from sglang_dflash.worker.step import Step


class RequestRows:
    """Rows of the running requests. The worker calls each method for every implementation, in the order given to it."""

    def start(self, batch: ScheduleBatch) -> None:
        """Start the requests of a prefill, before the target's forward.

        A row may have held another request. Decoding requests of a mixed batch and later chunks of a prompt go on.
        """

    def begin(self, batch: ScheduleBatch, tokens: Tensor) -> None:
        """Add the tokens that a prefill sampled, int64 [bs]; a later chunk replaces that of an unfinished prompt."""

    def commit(self, step: Step) -> None:
        """Add the tokens that a step accepted, ``step.accepted``."""

    def transferred(self, batch: ScheduleBatch) -> None:
        """Start requests that another server prefilled; ``batch.spec_info`` has the tokens that it sampled."""


def fresh_rows(batch: ScheduleBatch) -> list[int]:
    """Return the indices of the requests that a prefill starts; those of a mixed batch that decode were started."""
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    return [i for i, req in enumerate(batch.reqs) if id(req) not in decoding]
