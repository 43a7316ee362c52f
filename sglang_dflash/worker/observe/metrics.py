"""Step counters on SGLang's Prometheus endpoint."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Counter, Histogram

from sglang_dflash.upstream import get_observability, get_parallel, get_serving


class StepMetrics:
    """Two series of one scheduler process, which SGLang's ``/metrics`` collects from all of them.

    ``sglang_dflash:accept_length`` (histogram): accepted drafts plus the bonus token, per verified block.
    ``sglang_dflash:steps_total`` (counter, by ``width``): decode steps.
    """

    def __init__(self, max_width: int) -> None:
        labels = {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}
        self._accept_length = Histogram(
            "sglang_dflash:accept_length",
            "New tokens per verified block: accepted drafts plus the bonus token.",
            labelnames=labels,
            buckets=range(1, max_width + 1),
        ).labels(**labels)
        self._steps = Counter("sglang_dflash:steps", "Decode steps.", labelnames=(*labels, "width"))
        self._labels = labels

    def observe(self, width: int, accept_lens: Sequence[int]) -> None:
        """Count a finished step."""
        self._steps.labels(**self._labels, width=width).inc()
        for length in accept_lens:
            self._accept_length.observe(length)


def step_metrics(max_width: int) -> StepMetrics | None:
    """The series if this process exports metrics (``--enable-metrics``, one rank per replica), else None."""
    enabled = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
    return StepMetrics(max_width) if enabled else None
