"""Telemetry of the worker: counters for ``/server_info`` and series for SGLang's ``/metrics``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.runtime_context import get_observability, get_parallel, get_serving
from torch import Tensor

from sglang_dflash import __version__
from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.features.feature import Feature, host_copy
from sglang_dflash.features.payoff import Payoff
from sglang_dflash.features.width import Width
from sglang_dflash.width import AdaptiveWidth, WidthPolicy

if TYPE_CHECKING:
    from prometheus_client import Gauge, Histogram
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.step.flight import Finished
    from sglang_dflash.step.step import Step


logger = logging.getLogger(__name__)

EVERY = 32  # steps between reads of non-finite counts, and between timed steps at a fixed width


class Series:
    """Makes the Prometheus series of one scheduler process, in SGLang's ``/metrics``."""

    def __init__(self) -> None:
        self.labels = {"model_name": get_serving().served_model_name, "dp_rank": str(get_parallel().dp_rank or 0)}

    @classmethod
    def exported(cls) -> Series | None:
        """Return the series of one rank per replica; None on the others, and without ``--enable-metrics``."""
        return cls() if get_observability().enable_metrics and get_parallel().attn_tp_rank == 0 else None

    # at import the client reads the variable that SGLang sets for shared series
    def gauge(self, name: str, text: str, *by: str) -> Gauge:
        from prometheus_client import Gauge

        return Gauge(f"sglang_dflash:{name}", text, (*self.labels, *by), multiprocess_mode="mostrecent")

    def counter(self, name: str, text: str, *by: str) -> Any:
        from prometheus_client import Counter

        found = Counter(f"sglang_dflash:{name}", text, (*self.labels, *by))
        return found if by else found.labels(**self.labels)

    def histogram(self, name: str, text: str, most: int) -> Histogram:
        from prometheus_client import Histogram

        buckets = range(1, most + 1)
        return Histogram(f"sglang_dflash:{name}", text, tuple(self.labels), buckets=buckets).labels(**self.labels)


class StepMetrics:
    def __init__(self, series: Series, widest: int) -> None:
        self._labels = series.labels
        text = "New tokens per verified block: accepted drafts plus the bonus token."
        self._accept_length = series.histogram("accept_length", text, widest)
        self._width = series.histogram("width", "Positions of a step's block; 1 is plain decoding.", widest)
        self._steps = series.counter("steps", "Decode steps.", "width")
        # "measured": the last timed step; "predicted": the last launched step
        self._rate = series.gauge("tokens_per_ms", "Tokens of a decode step over its milliseconds.", "kind")
        self._survival = series.gauge("survival", "Chance that the draft at a position is committed.", "position")
        self._pays = series.gauge("drafting_pays", "0 while drafting does not pay, else 1.")
        text = "Drafted positions at which the drafter's output was not finite."
        self._not_finite = series.gauge("broken_drafts", text)

    def observe(self, step: Finished, policy: WidthPolicy, not_finite: int, pays: bool | None) -> None:
        self._width.observe(step.width)
        self._steps.labels(**self._labels, width=step.width).inc()
        self._not_finite.labels(**self._labels).set(not_finite)
        self._pays.labels(**self._labels).set(pays is not False)
        for length in step.accept_lens:
            self._accept_length.observe(length)
        for timed in step.timed:
            if timed.tokens and timed.milliseconds:
                self._set_rate("measured", timed.tokens / timed.milliseconds)
        if isinstance(policy, AdaptiveWidth):
            self._set_rate("predicted", policy.tokens_per_ms)
            for position, chance in enumerate(policy.survival.curve(), 1):
                self._survival.labels(**self._labels, position=position).set(chance)

    def _set_rate(self, kind: str, rate: float) -> None:
        self._rate.labels(**self._labels, kind=kind).set(rate)


class Telemetry(Feature):
    """Counts finished steps.

    ``not_finite``, int64 [] on the device, counts the drafter's non-finite positions: no other figure shows a broken
    drafter. ``payoff`` is None on a rank that does not log.
    """

    def __init__(
        self, width: Width, not_finite: Tensor, payoff: Payoff | None = None, series: Series | None = None
    ) -> None:
        self._width, self._on_device, self._payoff, self._launched = width, not_finite, payoff, 0
        self._widths = Counter[int]()  # steps by block width
        self._accept_lens = Counter[int]()  # blocks by accept length
        self._not_finite = 0
        self._versions = dict.fromkeys(("target", "draft"), get_serving().weight_version)
        self._metrics = None if series is None else StepMetrics(series, width.policy.widths[-1])

    def keep(self, step: Step) -> Tensor | None:
        self._launched += 1
        return host_copy(self._on_device) if self._launched % EVERY == 0 else None

    def read(self, finished: Finished, kept: Tensor | None) -> None:
        """The policy has not observed this step yet."""
        policy, pays = self._width.policy, None
        self._widths[finished.width] += 1
        self._accept_lens.update(finished.accept_lens)
        if kept is not None:
            self._count_not_finite(int(kept))
        if self._payoff is not None:
            self._payoff.count(finished, policy, self._not_finite)
            pays = self._payoff.pays
        if self._metrics is not None:
            self._metrics.observe(finished, policy, self._not_finite, pays)

    def forget(self, role: str, version: str | None) -> None:
        """The drafter is stale after an update of the target, unless it already had the same ``weight_version``."""
        is_stale = role == "target" and version != self._versions["draft"]
        self._versions[role] = version or get_serving().weight_version
        if self._payoff is not None:
            evidence = "weight_version {target} of the target, {draft} of the drafter".format(**self._versions)
            self._payoff.forget(evidence if is_stale else None)

    def info(self) -> dict[str, Any]:
        """Return counters and judgement."""
        blocks = self._accept_lens.total()
        tokens = sum(length * count for length, count in self._accept_lens.items())
        return {
            "steps_by_width": _for_json(self._widths),
            "blocks_by_accept_length": _for_json(self._accept_lens),
            "mean_accept_length": tokens / blocks if blocks else None,
            "broken_drafts": self._not_finite,
            "weight_versions": self._versions,
            "drafting": None if self._payoff is None else self._payoff.section(self._width.policy),
        }

    def _count_not_finite(self, total: int) -> None:
        if total and not self._not_finite and self._payoff is not None:
            logger.warning(
                "DFLASH: the drafter's output is not finite at %d drafted positions. Output is unaffected; these "
                "drafts are rejected. Fix: %s",
                total,
                FIXES[NOT_FINITE],
            )
        self._not_finite = total


def _for_json(counts: Counter[int]) -> dict[str, int]:
    return {str(number): count for number, count in sorted(counts.items())}


def identity(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner | None) -> dict[str, object]:
    return {
        "version": __version__,
        "target": target.model_config.model_path,
        "drafter": None if drafter is None else drafter.model_config.model_path,
        "dtype": str(target.model_config.dtype).removeprefix("torch."),
        "draft_attention_backend": None if drafter is None else drafter.draft_attention_backend,
        **plan.describe(),
    }


def allocated_bytes(target: ModelRunner, drafter: ModelRunner | None) -> dict[str, int]:
    states, scratch = _recurrent(target.req_to_token_pool)
    pool: Any = target.token_to_kv_pool
    sliding = _kv_bytes(pool.swa_kv_pool) if isinstance(pool, SWAKVPool) else 0
    return {
        "target_weights": _size(target.model.parameters()),
        "drafter_weights": 0 if drafter is None else _size(drafter.model.parameters()),
        "target_kv": _kv_bytes(pool) - sliding,
        "sliding_kv": sliding,
        "draft_kv": 0 if drafter is None else _kv_bytes(drafter.token_to_kv_pool),
        "states": states,
        "scratch": scratch,
    }


def _kv_bytes(pool: Any) -> int:
    size = pool.get_kv_size_bytes()  # of K and V, or one number of latent K/V (MLA)
    return int(sum(size) if isinstance(size, tuple) else size)  # a numpy integer is not JSON


def _recurrent(request_pool: Any) -> tuple[int, int]:
    pool = getattr(request_pool, "mamba_pool", None)
    if pool is None:
        return 0, 0
    cache = pool.mamba_cache
    states, whole = _size([*cache.conv, cache.temporal]), int(cache.mem_usage_bytes())
    # convolution windows overlap in storage, so their view is larger than the allocation
    windows = getattr(cache, "intermediate_conv_window", [])
    allocated = getattr(pool, "_intermediate_conv_window_phys", None) or windows
    return states, whole - states - _size(windows) + _size(allocated)


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
