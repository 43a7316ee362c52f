"""The protocol of a feature: its methods in the order in which the worker calls them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.utils.common import async_d2h
from torch import Tensor

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_dflash.step.flight import Finished
    from sglang_dflash.step.step import Step


class Feature:
    """State per request or per step. The worker calls its features in one order in every step."""

    def start(self, batch: ScheduleBatch) -> None:
        """Start the requests of a prefill, before the target's forward.

        A row may have held another request. Decoding requests of a mixed batch and later chunks continue.
        """

    def begin(self, batch: ScheduleBatch, tokens: Tensor) -> None:
        """Add the tokens that a prefill sampled, int64 [bs]; a later chunk replaces that of an unfinished prompt."""

    def transferred(self, batch: ScheduleBatch) -> None:
        """Start requests that another server prefilled; ``batch.spec_info`` has the tokens that it sampled."""
        self.start(batch)

    def after_draft(self, step: Step) -> None:
        """Read or change the drafts, before the target's forward."""

    def commit(self, step: Step) -> None:
        """Add the tokens of ``step.accepted``."""

    def collect(self, step: Step) -> Any:
        """Return data of a launched step for :meth:`read`. A later step must not write its device memory."""

    def read(self, finished: Finished, collected: Any) -> None:
        """Read a step whose accept counts are on the host, in the order of the launches."""

    def info(self) -> dict[str, Any]:
        """Return this feature's part of ``/server_info``."""
        return {}

    def forget(self, role: str, version: str | None) -> None:
        """Drop results that depend on the updated weights of ``role``, ``"target"`` or ``"draft"``."""


def fresh_rows(batch: ScheduleBatch) -> list[int]:
    """Return the indices of the requests that a prefill starts."""
    decoding = {id(req) for req in batch.decoding_reqs or ()}
    return [i for i, req in enumerate(batch.reqs) if id(req) not in decoding]


def host_copy(tensor: Tensor) -> Tensor:
    """Return a copy that reaches the host before the counts of the step that is being launched."""
    return tensor.clone() if tensor.is_cpu else async_d2h(tensor)
