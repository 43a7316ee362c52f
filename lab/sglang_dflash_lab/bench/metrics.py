"""Every figure that a table or a plot shows, defined once.

Sources named below:

* *card*: the model card of Qwen3.5-4B-DFlash, section "Setup".
* *bench_serving*: ``sglang.benchmark.serving.calculate_metrics`` of SGLang 0.5.23.
* *z-lab*: ``dflash/benchmark.py`` of github.com/z-lab/dflash.
* *SpecForge*: ``benchmarks/`` of github.com/sgl-project/SpecForge.

Throughputs are tokens per second, times are seconds, lengths and widths are tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sglang_dflash.diagnose.answers import NAN, RequestRecord
from sglang_dflash.diagnose.answers import accept_length_macro as accept_length_macro
from sglang_dflash.diagnose.answers import accepted_histogram as accepted_histogram
from sglang_dflash_lab.bench.results import RunRecord

Floats = NDArray[np.float64]
_RESAMPLES = 10_000


# Speed


def output_throughput(requests: Sequence[RequestRecord], wall_s: float) -> float:
    """Generated tokens / wall-clock time of the run, prefill and scheduling included (*card*, *bench_serving*)."""
    return sum(r.completion_tokens for r in requests) / wall_s


def decode_throughput(requests: Sequence[RequestRecord]) -> float:
    """Mean over requests of (tokens - 1) / (latency - TTFT): what one user sees after the first token.

    The reciprocal of TPOT, averaged over requests; requests of a single token have no decode phase and do not count.
    """
    return _mean([1 / t for t in tpots(requests)])


def ttfts(requests: Sequence[RequestRecord]) -> Floats:
    """Time to the first token, per request (*bench_serving*)."""
    return np.array([r.ttft_s for r in requests])


def tpots(requests: Sequence[RequestRecord]) -> Floats:
    """Time per output token after the first, (latency - TTFT) / (tokens - 1), per request (*bench_serving*)."""
    return np.array([(r.latency_s - r.ttft_s) / (r.completion_tokens - 1) for r in requests if r.completion_tokens > 1])


def percentiles(values: Floats) -> tuple[float, ...]:
    """The 50th, 95th and 99th, linearly interpolated; NaN for no values."""
    return tuple(float(p) for p in np.percentile(values, (50, 95, 99))) if len(values) else (NAN, NAN, NAN)


def step_seconds(requests: Sequence[RequestRecord]) -> float:
    """Decode time per verify step of one request: Σ (latency - TTFT) / Σ steps; NaN without speculation.

    At concurrency 1 this is the cost of one step: draft, verify, the scheduler and the way to the client together.
    """
    decoding = [r for r in requests if r.verify_steps]
    return _ratio(sum(r.latency_s - r.ttft_s for r in decoding), sum(r.verify_steps for r in decoding))


# Acceptance


def accept_length_micro(requests: Sequence[RequestRecord]) -> float:
    """Σ completion_tokens / Σ spec_verify_ct (*SpecForge*): long answers weigh more."""
    speculated = [r for r in requests if r.verify_steps]
    return _ratio(sum(r.completion_tokens for r in speculated), sum(r.verify_steps for r in speculated))


def committed_per_step(requests: Sequence[RequestRecord]) -> float:
    """Mean over steps of accepted drafts + bonus, from the histogram.

    Free of two small biases of the accept lengths above: the first token comes from prefill and costs no step, and
    the tokens of a last block beyond a stop are not in ``completion_tokens``.
    """
    histogram = accepted_histogram(requests)
    return _ratio(sum(tokens * steps for tokens, steps in enumerate(histogram, 1)), sum(histogram))


def mean_width(runs: Sequence[RunRecord]) -> float:
    """Mean block width over verify steps, from our worker's counters; NaN for another worker."""
    steps = _sum_counters(runs, "steps_by_width")
    return _ratio(sum(int(width) * count for width, count in steps.items()), sum(steps.values()))


def stage_seconds_per_step(runs: Sequence[RunRecord]) -> dict[str, float]:
    """Seconds a step spends in each stage of our worker; empty unless the server runs with stage times on.

    A step serves the whole batch, so these compare with ``step_seconds`` at concurrency 1 only.
    """
    steps = sum(_sum_counters(runs, "steps_by_width").values())
    return {stage: total / steps for stage, total in _sum_counters(runs, "stage_seconds").items() if steps}


def host_seconds_per_step(requests: Sequence[RequestRecord], runs: Sequence[RunRecord]) -> float:
    """Step time outside draft and verify: our own stages, the scheduler, detokenising, HTTP and the client.

    NaN unless the server measures stage times; meaningful at concurrency 1.
    """
    stages = stage_seconds_per_step(runs)
    if not stages:
        return NAN
    return step_seconds(requests) - stages.get("draft", 0.0) - stages.get("verify", 0.0)


# Answers


def accuracy(requests: Sequence[RequestRecord]) -> float:
    """Share of right answers among those that can be checked; NaN if none can."""
    return _mean([float(r.correct) for r in requests if r.correct is not None])


@dataclass(frozen=True)
class Agreement:
    """Count of answers that equal the reference arm's, token for token.

    Attributes:
        equal, compared: requests that are equal, and that both arms have.
        first_differences: per unequal request, the index of the first output token that differs.
    """

    equal: int
    compared: int
    first_differences: tuple[int, ...] = ()


def agreement(requests: Sequence[RequestRecord], reference: Sequence[RequestRecord]) -> Agreement:
    """Compare output token ids with the reference arm's on the same question, turn and repeat.

    Only prompts that are identical in both arms are compared. Under greedy decoding in float32 everything must be
    equal; in low precision the arms may part at near-ties of the target's logits.
    """
    expected = {_prompt_key(r): r.output_ids for r in reference}
    pairs = [(r.output_ids, expected[_prompt_key(r)]) for r in requests if _prompt_key(r) in expected]
    differences = tuple(_first_difference(a, b) for a, b in pairs if a != b)
    return Agreement(len(pairs) - len(differences), len(pairs), differences)


def _prompt_key(request: RequestRecord) -> tuple[int, str, int, str]:
    return request.run.repeat, request.question, request.turn, request.prompt_sha256


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# Speed-up


@dataclass(frozen=True)
class SpeedUp:
    """Ratio of two arms' throughputs with a bootstrap interval; ``low`` and ``high`` are NaN below three repeats."""

    ratio: float = NAN
    low: float = NAN
    high: float = NAN
    repeats: int = 0


def speed_up(throughput: dict[int, float], baseline: dict[int, float], seed: int = 0) -> SpeedUp:
    """Median throughput of the arm / median throughput of the baseline, over repeats that both have.

    The interval of 95 % is the percentile bootstrap (Efron & Tibshirani 1993, chapter 13) over *repeats*, resampled in
    pairs: runs of one repeat are neighbours in time, so a slow minute of the machine is in both of them.

    Args:
        throughput, baseline: tokens/s by repeat.
        seed: of the resampling; the same results give the same interval.
    """
    repeats = sorted(throughput.keys() & baseline.keys())
    if not repeats:
        return SpeedUp()
    ours = np.array([throughput[r] for r in repeats])
    theirs = np.array([baseline[r] for r in repeats])
    ratio = float(np.median(ours) / np.median(theirs))
    if len(repeats) < 3:
        return SpeedUp(ratio, repeats=len(repeats))
    picks = np.random.default_rng(seed).integers(len(repeats), size=(_RESAMPLES, len(repeats)))
    ratios = np.median(ours[picks], axis=1) / np.median(theirs[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return SpeedUp(ratio, float(low), float(high), len(repeats))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else NAN


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator else NAN


def _sum_counters(runs: Sequence[RunRecord], name: str) -> Counter[str]:
    total: Counter[str] = Counter()
    for run in runs:
        total.update((run.worker or {}).get(name, {}))
    return total
