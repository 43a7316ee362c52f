"""Step counters on SGLang's Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_dflash.upstream import get_observability, get_parallel, get_serving
from sglang_dflash.width import AdaptiveWidth, WidthPolicy
from sglang_dflash.worker.copies import LONGEST

if TYPE_CHECKING:
    from prometheus_client import Gauge, Histogram

    from sglang_dflash.worker.observe.observer import StepRecord


class StepMetrics:
    """The series of one scheduler process, which SGLang's ``/metrics`` collects from all of them.

    ``sglang_dflash:accept_length`` (histogram): accepted drafts plus the bonus token, per verified block.
    ``sglang_dflash:width`` (histogram): positions of a step's block; 1 is plain decoding.
    ``sglang_dflash:steps_total`` (counter, by ``width``): decode steps.
    ``sglang_dflash:tokens_per_ms`` (gauge, by ``kind``): ``measured`` in the last step whose time is known, and, of an
    adaptive width, ``predicted`` for the last step launched.
    ``sglang_dflash:survival`` (gauge, by ``position``), of an adaptive width: the chance that a draft is committed.
    ``sglang_dflash:drafting_pays`` (gauge): 0 while drafting is seen not to pay (:mod:`.payoff`), else 1.
    ``sglang_dflash:broken_drafts`` (gauge): drafted positions at which the drafter's output was not finite.
    ``sglang_dflash:match_length`` (histogram) and ``sglang_dflash:copied_tokens_total`` (counter): matches of copied
    blocks, and tokens that copies brought and drafts would not have.
    """

    def __init__(self, max_width: int) -> None:
        # Not before: the client decides at its import whether processes share series, by a variable that SGLang sets.
        from prometheus_client import Counter, Gauge, Histogram

        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}

        def gauge(name: str, text: str, *by: str) -> Gauge:
            return Gauge(f"sglang_dflash:{name}", text, (*labels, *by), multiprocess_mode="mostrecent")

        def histogram(name: str, text: str, most: int = max_width) -> Histogram:
            buckets = range(1, most + 1)
            return Histogram(f"sglang_dflash:{name}", text, tuple(labels), buckets=buckets).labels(**labels)

        self._accept_length = histogram(
            "accept_length", "New tokens per verified block: accepted drafts plus the bonus token."
        )
        self._width = histogram("width", "Positions of a step's block; 1 is plain decoding.")
        self._steps = Counter("sglang_dflash:steps", "Decode steps.", (*labels, "width"))
        self._rate = gauge("tokens_per_ms", "Tokens of a decode step over its milliseconds.", "kind")
        self._survival = gauge("survival", "Chance that the draft at a position is committed.", "position")
        self._pays = gauge("drafting_pays", "0 while drafting is seen not to pay, else 1.")
        self._broken = gauge("broken_drafts", "Drafted positions at which the drafter's output was not finite.")
        self._match_length = histogram("match_length", "Tokens of a copied block's match.", LONGEST)
        self._copied = Counter("sglang_dflash:copied_tokens", "Tokens that copies brought.", tuple(labels))
        self._labels = labels

    def observe(
        self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy, broken: int, pays: bool | None
    ) -> None:
        """Count a finished step, and the steps whose time became known.

        Args:
            broken: drafts so far.
            pays: whether drafting does; None if nobody knows yet.
        """
        self._width.observe(record.width)
        self._steps.labels(**self._labels, width=record.width).inc()
        self._broken.labels(**self._labels).set(broken)
        self._pays.labels(**self._labels).set(pays is not False)
        for length in record.accept_lens:
            self._accept_length.observe(length)
        if record.copied is not None:
            self._copied.labels(**self._labels).inc(record.copied.tokens)
            for length in record.copied.lengths:
                self._match_length.observe(length)
        for done in timed:
            if done.accept_lens and done.milliseconds:
                self._set_rate("measured", sum(done.accept_lens) / done.milliseconds)
        if isinstance(policy, AdaptiveWidth):
            self._set_rate("predicted", policy.tokens_per_ms)
            for position, chance in enumerate(policy.survival.curve(), 1):
                self._survival.labels(**self._labels, position=position).set(chance)

    def _set_rate(self, kind: str, rate: float) -> None:
        self._rate.labels(**self._labels, kind=kind).set(rate)


def step_metrics(max_width: int) -> StepMetrics | None:
    """The series if this process exports metrics (``--enable-metrics``, one rank per replica), else None."""
    enabled = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
    return StepMetrics(max_width) if enabled else None
