"""Telemetry of the worker: counters for ``/server_info`` and series for SGLang's ``/metrics``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from sglang_dflash import __version__
from sglang_dflash.causes import FIXES, NOT_FINITE
from sglang_dflash.features.copies import MAX_MATCH
from sglang_dflash.features.payoff import Payoff
from sglang_dflash.upstream.worker import get_observability, get_parallel, get_serving
from sglang_dflash.width import AdaptiveWidth, WidthPolicy
from sglang_dflash.worker.flight import StepRecord, on_host

if TYPE_CHECKING:
    from prometheus_client import Gauge, Histogram

    from sglang_dflash.plan.serving import ServingPlan
    from sglang_dflash.upstream.worker import ModelRunner


logger = logging.getLogger(__name__)

EVERY = 32  # steps between reads of non-finite counts, and between timed steps at a fixed width


class StepMetrics:
    """The series of one scheduler process."""

    def __init__(self, max_width: int) -> None:
        # at import the client reads the variable that SGLang sets for shared series
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
        # "measured": the last timed step; "predicted": the last launched step
        self._rate = gauge("tokens_per_ms", "Tokens of a decode step over its milliseconds.", "kind")
        self._survival = gauge("survival", "Chance that the draft at a position is committed.", "position")
        self._pays = gauge("drafting_pays", "0 while drafting does not pay, else 1.")
        self._not_finite = gauge("broken_drafts", "Drafted positions at which the drafter's output was not finite.")
        self._match_length = histogram("match_length", "Tokens of a copied block's match.", MAX_MATCH)
        self._copied = Counter("sglang_dflash:copied_tokens", "Accepted tokens that copies added.", tuple(labels))
        self._labels = labels

    def observe(
        self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy, not_finite: int, pays: bool | None
    ) -> None:
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


class Observer:
    """Counts finished steps.

    ``not_finite``, int64 [] on the device, counts the drafter's non-finite positions: no other figure shows a broken
    drafter. ``payoff`` is None on a rank that does not log.
    """

    def __init__(self, max_width: int, not_finite: Tensor, payoff: Payoff | None = None) -> None:
        self._on_device, self._payoff, self._launched = not_finite, payoff, 0
        self._widths = Counter[int]()  # steps by block width
        self._accept_lens = Counter[int]()  # blocks by accept length
        self._match_lens = Counter[int]()  # copied blocks by match length
        self._copied_tokens = self._not_finite = 0
        self._versions = dict.fromkeys(("target", "draft"), get_serving().weight_version)
        exports = get_observability().enable_metrics and get_parallel().attn_tp_rank == 0  # one rank per replica
        self._metrics = StepMetrics(max_width) if exports else None

    def started(self, record: StepRecord) -> None:
        self._launched += 1
        if self._launched % EVERY == 0:
            record.not_finite = on_host(self._on_device)

    def count(self, record: StepRecord, timed: Sequence[StepRecord], policy: WidthPolicy) -> None:
        """``policy`` has not observed this step yet."""
        self._widths[record.width] += 1
        self._accept_lens.update(record.accept_lens)
        self._match_lens.update(record.match_lens)
        self._copied_tokens += record.copied_tokens
        if record.not_finite is not None:
            self._count_not_finite(int(record.not_finite))
        pays = None
        if self._payoff is not None:
            self._payoff.count(record, policy, self._not_finite)
            pays = self._payoff.pays
        if self._metrics is not None:
            self._metrics.observe(record, timed, policy, self._not_finite, pays)

    def weights_updated(self, role: str, version: str | None) -> None:
        """Note an update of ``"target"`` or ``"draft"``: the drafter is stale after one of the target, unless it
        already had the same ``weight_version``."""
        is_stale = role == "target" and version != self._versions["draft"]
        self._versions[role] = version or get_serving().weight_version
        if self._payoff is not None:
            evidence = "weight_version {target} of the target, {draft} of the drafter".format(**self._versions)
            self._payoff.forget(evidence if is_stale else None)

    def _count_not_finite(self, total: int) -> None:
        if total and not self._not_finite and self._payoff is not None:
            logger.warning(
                "DFLASH: the drafter's output is not finite at %d drafted positions. Output is unaffected; these "
                "drafts are rejected. Fix: %s",
                total,
                FIXES[NOT_FINITE],
            )
        self._not_finite = total

    def info(self, policy: WidthPolicy) -> dict[str, Any]:
        """Return counters and judgement for ``/server_info``."""
        blocks = self._accept_lens.total()
        tokens = sum(length * count for length, count in self._accept_lens.items())
        return {
            "steps_by_width": _for_json(self._widths),
            "blocks_by_accept_length": _for_json(self._accept_lens),
            "mean_accept_length": tokens / blocks if blocks else None,
            "copied_blocks_by_match_length": _for_json(self._match_lens),
            "copied_tokens": self._copied_tokens,
            "broken_drafts": self._not_finite,
            "weight_versions": self._versions,
            "drafting": None if self._payoff is None else self._payoff.section(policy),
        }


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
    return {
        "target_weights": _size(target.model.parameters()),
        "drafter_weights": 0 if drafter is None else _size(drafter.model.parameters()),
        "target_kv": int(sum(target.token_to_kv_pool.get_kv_size_bytes())),  # a numpy integer is not JSON
        "draft_kv": 0 if drafter is None else int(sum(drafter.token_to_kv_pool.get_kv_size_bytes())),
        "states": states,
        "scratch": scratch,
    }


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
