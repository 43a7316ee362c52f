"""The figures by hand on small records, and the properties that hold for all."""

from __future__ import annotations

import math

import pytest

from sglang_dflash_lab.bench import metrics
from sglang_dflash_lab.bench.results import RunKey, RunRecord
from sglang_dflash_lab.bench.summary import Summary
from tests.bench.records import comparison, request, run


def test_tpot_leaves_the_first_token_out_and_skips_single_tokens():
    requests = [request(output_ids=(1,) * 11, ttft_s=1.0, latency_s=3.0), request(output_ids=(1,))]
    assert metrics.tpots(requests).tolist() == [0.2]
    assert metrics.decode_throughput(requests) == 5.0


def test_macro_and_micro_accept_length_differ_where_answers_differ_in_length():
    requests = [
        request(output_ids=(1,) * 10, accepted=(9,)),  # 10 tokens a step
        request(output_ids=(1,) * 40, accepted=(1,) * 20),  # 2 tokens a step
    ]
    assert metrics.accept_length_macro(requests) == 6.0
    assert metrics.accept_length_micro(requests) == pytest.approx(50 / 21)


def test_histogram_counts_steps_and_committed_adds_the_bonus():
    requests = [request(accepted=(0, 3, 3)), request(accepted=(1,))]
    assert metrics.accepted_histogram(requests) == [1, 1, 0, 2]
    assert metrics.committed_per_step(requests) == (1 + 4 + 4 + 2) / 4


def test_without_speculation_there_is_no_accept_length():
    plain = [request()]
    assert math.isnan(metrics.accept_length_macro(plain))
    assert math.isnan(metrics.accept_length_micro(plain))
    assert math.isnan(metrics.step_seconds(plain))


def test_width_and_stages_come_from_the_workers_counters():
    counters = {"steps_by_width": {"8": 1, "16": 3}, "stage_seconds": {"draft": 0.4, "verify": 0.8}}
    runs = [RunRecord(RunKey("dflash:16", "math", 1, 0), 1.0, 0, "", 0.0, worker=counters)]
    assert metrics.mean_width(runs) == 14.0
    assert metrics.stage_seconds_per_step(runs) == {"draft": 0.1, "verify": 0.2}
    steps = [request(accepted=(1, 1), ttft_s=0.0, latency_s=1.0)]  # 0.5 s a step
    assert metrics.host_seconds_per_step(steps, runs) == pytest.approx(0.2)
    assert math.isnan(metrics.mean_width([run("builtin:16")]))


def test_agreement_names_the_first_token_that_differs():
    reference = [request(question=str(i), output_ids=(1, 2, 3)) for i in range(3)]
    answers = ((1, 2, 3), (1, 9, 3), (1, 2))  # the last one stops early, and differs at its end
    arm = [request(mode="dflash:8", question=str(i), output_ids=ids) for i, ids in enumerate(answers)]
    arm.append(request(mode="dflash:8", repeat=1))  # which the reference has not answered
    assert metrics.agreement(arm, reference) == metrics.Agreement(1, 3, (1, 2))


def test_speed_up_is_the_ratio_of_medians_over_shared_repeats():
    found = metrics.speed_up({0: 30.0, 1: 50.0, 2: 40.0, 7: 1.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert (found.ratio, found.repeats) == (2.0, 3)
    assert found.low <= found.ratio <= found.high


def test_the_interval_is_reproducible_and_needs_three_repeats():
    arm, baseline = {r: 20.0 + r for r in range(5)}, {r: 10.0 - r / 10 for r in range(5)}
    assert metrics.speed_up(arm, baseline) == metrics.speed_up(arm, baseline)
    assert metrics.speed_up(arm, baseline, seed=1).ratio == metrics.speed_up(arm, baseline).ratio
    two = metrics.speed_up({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert math.isnan(two.low) and math.isnan(two.high)


def test_pairing_takes_a_common_drift_out_of_the_interval():
    """Both arms slow down together: resampled in pairs, the ratio hardly moves."""
    speeds = {r: 100.0 / (1 + r) for r in range(5)}
    found = metrics.speed_up({r: 2 * s for r, s in speeds.items()}, speeds)
    assert (found.low, found.ratio, found.high) == (2.0, 2.0, 2.0)


def test_summary_of_a_comparison():
    summary = Summary(comparison())
    row = summary.row("dflash:16", "math", 1)
    assert row is not None
    assert (row.throughput, row.speed_up, row.requests, row.repeats) == (16.0, 2.0, 6, 3)
    assert (row.equal, row.compared, row.accuracy, row.width) == (6, 6, 1.0, 16.0)
    assert summary.modes == ["ar", "dflash:16"]
