"""The width of each step: a policy picks it, and observes the step when its accept counts are on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from sglang.srt.runtime_context import get_parallel

from sglang_dflash.features.feature import Feature
from sglang_dflash.step.flight import PickedWidth
from sglang_dflash.width import WidthPolicy
from sglang_dflash.width.policy import BUCKETS

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_dflash.step.flight import Finished

Buckets = Callable[[Sequence["Req"]], Sequence[int]]  # bucket of match lengths per request; empty without copies


class Load(NamedTuple):
    """The arguments of :meth:`WidthPolicy.width`."""

    batch_size: int
    matches: Sequence[int]

    @classmethod
    def of(cls, batch: ScheduleBatch | None, buckets: Sequence[int]) -> Load:
        requests = 0 if batch is None else batch.batch_size()
        return cls(requests, [buckets.count(bucket) for bucket in range(BUCKETS)])


class Width(Feature):
    """Width of the steps of one scheduler. A step of a width runs in the context ``at(width)``."""

    def __init__(self, policy: WidthPolicy, buckets: Buckets) -> None:
        self.policy, self.buckets = policy, buckets
        self.at: Callable[[int], AbstractContextManager[Any]] = nullcontext

    def pick(self, batch: ScheduleBatch) -> PickedWidth:
        buckets = self.buckets(batch.reqs)
        load = self.load_of(batch, buckets)
        return PickedWidth(self.policy.width(*load), load.batch_size, buckets)

    def load_of(self, batch: ScheduleBatch, buckets: Sequence[int]) -> Load:
        return Load.of(batch, buckets)

    def read(self, finished: Finished, collected: Any) -> None:
        self.policy.observe(finished.width, finished.accept_lens, finished.buckets)
        if get_parallel().tp_size == 1:  # times differ between ranks, and ranks must pick equal widths
            for each in finished.timed:
                self.policy.observe_time(each.batch_size, each.width, each.milliseconds, at_most=each.caught_up)

    def info(self) -> dict[str, Any]:
        return {"width": self.policy.describe()}

    def forget(self, role: str, version: str | None) -> None:
        self.policy.forget()
