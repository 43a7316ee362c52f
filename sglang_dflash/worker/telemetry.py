"""Telemetry of the worker, which drives nothing: counters for ``/server_info`` and series for SGLang's ``/metrics``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sglang_dflash import __version__
from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.upstream.worker import get_observability, get_parallel, get_serving
from sglang_dflash.width import AdaptiveWidth, WidthPolicy
from sglang_dflash.worker.copies import LONGEST
from sglang_dflash.worker.flight import Clock, StepRecord
from sglang_dflash.worker.payoff import Payoff

if TYPE_CHECKING:
    from prometheus_client import Gauge, Histogram

    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream.worker import ModelRunner


logger = logging.getLogger(__name__)

EVERY = 32  # steps between two reads of the count of non-finite drafts, and between two timed steps at a fixed width


@dataclass
class StepStats:
    """Counters of one worker since it started."""

    widths: Counter[int] = field(default_factory=Counter)  # steps by block width
    accept_lens: Counter[int] = field(default_factory=Counter)  # verified blocks by accept length
    match_lens: Counter[int] = field(default_factory=Counter)  # copied blocks by the length of their match
    copied_tokens: int = 0  # accepted tokens that copies added to those of the drafts that they replaced

    def count(self, record: StepRecord) -> None:
        self.widths[record.width] += 1
        self.accept_lens.update(record.accept_lens)
        self.match_lens.update(record.match_lens)
        self.copied_tokens += record.copied_tokens

    @property
    def mean_accept_length(self) -> float | None:
        """New tokens per verified block; None before the first."""
        blocks = sum(self.accept_lens.values())
        return sum(n * count for n, count in self.accept_lens.items()) / blocks if blocks else None

    def as_dict(self) -> dict[str, Any]:
        """Return the counters for ``/server_info``, with the string keys that JSON needs."""
        return {
            "steps_by_width": {str(width): n for width, n in sorted(self.widths.items())},
            "blocks_by_accept_length": {str(length): n for length, n in sorted(self.accept_lens.items())},
            "mean_accept_length": self.mean_accept_length,
            "copied_blocks_by_match_length": {str(length): n for length, n in sorted(self.match_lens.items())},
            "tokens_brought_by_copies": self.copied_tokens,
        }


class StepMetrics:
    """The series of one scheduler process. SGLang's ``/metrics`` merges all processes."""

    def __init__(self, max_width: int) -> None:
        # Imported late: the client reads the variable that SGLang sets for shared series at its import.
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
        # "measured": the last timed step; "predicted", with an adaptive width: the last launched step
        self._rate = gauge("tokens_per_ms", "Tokens of a decode step over its milliseconds.", "kind")
        self._survival = gauge("survival", "Chance that the draft at a position is committed.", "position")
        self._pays = gauge("drafting_pays", "0 while drafting does not pay, else 1.")
        self._not_finite = gauge("broken_drafts", "Drafted positions at which the drafter's output was not finite.")
        self._match_length = histogram("match_length", "Tokens of a copied block's match.", LONGEST)
        self._copied = Counter("sglang_dflash:copied_tokens", "Accepted tokens that copies added.", tuple(labels))
        self._labels = labels

    def observe(
        self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy, not_finite: int, pays: bool | None
    ) -> None:
        """Count a finished step and newly timed steps; ``pays`` is None before it is judged."""
        self._width.observe(record.width)
        self._steps.labels(**self._labels, width=record.width).inc()
        self._not_finite.labels(**self._labels).set(not_finite)
        self._pays.labels(**self._labels).set(pays is not False)
        for length in record.accept_lens:
            self._accept_length.observe(length)
        if record.copied_tokens:
            self._copied.labels(**self._labels).inc(record.copied_tokens)
        for length in record.match_lens:
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
    """Return the series if this process exports metrics (``--enable-metrics``, one rank per replica), else None."""
    enabled = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0
    return StepMetrics(max_width) if enabled else None


class NotFinite:
    """Copies the drafter's count of non-finite positions to the host without blocking, and warns of the first.

    The target rejects such drafts, so no other figure shows that the drafter is broken.
    """

    def __init__(self, count: Tensor, warns: bool) -> None:
        self._count, self._warns, self._clock = count, warns, Clock(count.device)
        self._on_host = torch.zeros((), dtype=torch.int64, pin_memory=count.device.type != "cpu")
        self._reading: Any = None
        self.total = 0

    def read(self) -> None:
        if self._reading is None:
            self._on_host.copy_(self._count, non_blocking=True)
            self._reading = self._clock.now()

    def collect(self) -> int:
        if self._reading is not None and self._clock.has_passed(self._reading):
            self._reading, before, self.total = None, self.total, int(self._on_host)
            if self.total and not before and self._warns:
                logger.warning(
                    "DFLASH: the drafter's output is not finite at %d drafted positions. Output is unaffected; these "
                    "drafts are rejected. Fix: %s",
                    self.total,
                    FIXES[NOT_FINITE],
                )
        return self.total


class Observer:
    """Counts finished steps.

    Args:
        max_width: positions of the widest block.
        not_finite: int64 [] on the device, the drafter's count of non-finite positions.
        payoff: judges whether drafting pays; None on a rank that does not log.
    """

    def __init__(self, max_width: int, not_finite: Tensor, payoff: Payoff | None = None) -> None:
        self._stats, self._not_finite = StepStats(), NotFinite(not_finite, warns=payoff is not None)
        self._metrics, self._payoff, self._launched = step_metrics(max_width), payoff, 0

    def started(self) -> None:
        """Call on a decode step's stream before its launch."""
        self._launched += 1
        if self._launched % EVERY == 0:
            self._not_finite.read()

    def count(self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy) -> None:
        """Count a finished step, and the steps whose time is new; ``policy`` has not observed this step yet."""
        self._stats.count(record)
        not_finite, pays = self._not_finite.collect(), None
        if self._payoff is not None:
            self._payoff.count(record, policy, not_finite)
            pays = self._payoff.pays
        if self._metrics is not None:
            self._metrics.observe(record, timed, policy, not_finite, pays)

    def info(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return counters and judgement for ``/server_info``."""
        drafting = None if self._payoff is None else self._payoff.section(policy)
        return {**self._stats.as_dict(), "broken_drafts": self._not_finite.collect(), "drafting": drafting}


# With ``--enable-linear-replayssm-spec``, SGLang keeps these inputs instead of a state per block position.
_REPLAYED = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_rawv", "replayssm_rawk", "replayssm_beta")


def identity(plan: ServingPlan, target: ModelRunner, drafter: ModelRunner) -> dict[str, object]:
    """Return the constant part of a worker's ``/server_info``: version, models and plan."""
    return {
        "version": __version__,
        "target": target.model_config.model_path,
        "drafter": drafter.model_config.model_path,
        "dtype": str(target.model_config.dtype).removeprefix("torch."),
        "draft_attention_backend": drafter.draft_attention_backend,
        **plan.describe(),
    }


def allocated_bytes(target: ModelRunner, drafter: ModelRunner) -> dict[str, int]:
    """Return the allocated bytes by the names of ``sglang-dflash check``."""
    states, scratch = _recurrent(target.req_to_token_pool)
    return {
        "target_weights": _size(target.model.parameters()),
        "drafter_weights": _size(drafter.model.parameters()),
        "target_kv": int(sum(target.token_to_kv_pool.get_kv_size_bytes())),  # a numpy integer is not JSON
        "draft_kv": int(sum(drafter.token_to_kv_pool.get_kv_size_bytes())),
        "states": states,
        "scratch": scratch,
    }


def _recurrent(request_pool: Any) -> tuple[int, int]:
    pool = getattr(request_pool, "mamba_pool", None)
    if pool is None:
        return 0, 0
    cache = pool.mamba_cache
    # Convolution windows overlap in storage, so their view is larger than the allocation. A prefill server has none.
    windows = getattr(pool, "_intermediate_conv_window_phys", None) or getattr(cache, "intermediate_conv_window", [])
    kept = [getattr(cache, name, None) for name in ("intermediate_ssm", *_REPLAYED)]
    return _size([*cache.conv, cache.temporal]), _size([*windows, *(tensor for tensor in kept if tensor is not None)])


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in tensors)
