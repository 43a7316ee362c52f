"""Several replicas predicted from one: requests in flight and streams, rows that resume, the report, the pace."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import pytest

from measure import replicas_load, replicas_many, replicas_report
from measure.replicas import Cell, Plan, Rows, cells
from measure.replicas_load import Asker, Estimate, mean_in_flight
from measure.replicas_many import LEAST_LOADED, RANDOM, card_rates, predict, table
from measure.replicas_model import Rates, split_at_random
from measure.replicas_report import compared, report
from measure.replicas_servers import sums
from sglang_dflash.errors import DFlashError
from tests.support.hurry import Hurry

PLUGIN = Path(__file__).parents[1] / "plugin"
PLAN = Plan("p", 8, 4, "1 2 3", 16, 32, 64, 100.0, 20.0)
RATES = {1: 1.0, 2: 1.8, 4: 3.0}


@pytest.fixture(autouse=True)
def short_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_many, "_REQUESTS", 10_000)
    monkeypatch.setattr(replicas_report, "RUNS", 20)


class Pretender(Asker):
    """A server in which every request takes as long as there are in it when it comes."""

    most = held = 0

    async def ask(self) -> tuple[float, float]:
        self.held += 1
        self.most = max(self.most, self.held)
        sent, prompt = replicas_load.now(), next(self._asked)
        await asyncio.sleep(self.held + 0 * len(prompt))
        self.held -= 1
        return sent, replicas_load.now()


def pretend(monkeypatch: pytest.MonkeyPatch, job: Any) -> tuple[Any, Pretender]:
    with asyncio.Runner(loop_factory=Hurry) as runner:
        monkeypatch.setattr(replicas_load, "now", runner.get_loop().time)
        asker = Pretender("http://nowhere", [[1], [2], [3]], 8, Random(0))
        return runner.run(job(asker)), asker


def test_the_rate_in_a_closed_loop_is_users_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    rate, asker = pretend(monkeypatch, lambda asker: asker.in_flight(4, 40))
    assert asker.most == 4
    assert rate.value == pytest.approx(1.0)
    assert rate.error == pytest.approx(0.0)


def test_a_stream_comes_at_its_rate_and_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    requests, asker = pretend(monkeypatch, lambda asker: asker.poisson(2.0, 200.0, Random(1)))
    starts = [sent for sent, _ in requests]
    assert starts == sorted(starts) and starts[-1] < 200
    assert len(requests) == pytest.approx(400, rel=0.15)
    assert asker.most > 4 and asker.held == 0


def test_all_prompts_are_asked_before_one_comes_again() -> None:
    rounds = replicas_load._rounds([[1], [2], [3]], Random(0))
    for _ in range(4):
        assert sorted(next(rounds) for _ in range(3)) == [[1], [2], [3]]


def test_the_error_is_that_of_batch_means() -> None:
    steady = Estimate.of([1.0, 3.0] * 10)
    assert (steady.value, steady.error) == (2.0, 0.0)
    drifting = Estimate.of([1.0] * 10 + [3.0] * 10)
    assert drifting.value == 2.0
    assert drifting.error == pytest.approx(0.4472, abs=1e-4)  # batches 1, 1, 2, 3, 3
    assert Estimate.of([5.0]) == Estimate(5.0, 0.0)


def test_requests_in_flight_are_counted_inside_the_window() -> None:
    assert mean_in_flight([(0.0, 10.0), (4.0, 6.0), (9.0, 20.0)], 5.0, 10.0) == pytest.approx((5 + 1 + 1) / 5)


def test_series_are_summed_over_their_labels() -> None:
    text = '# HELP a:b what\na:b{x="1",y="z w"} 2.0\na:b{x="2"} 3e0\na:b_sum{x="1"} 7.0\nprocess_x 1.5\n'
    assert sums(text) == {"a:b": 5.0, "a:b_sum": 7.0, "process_x": 1.5}


def test_rows_of_another_plan_are_not_read(tmp_path: Path) -> None:
    rows, other = (Rows(tmp_path / "rows", Plan(name, *list(asdict(PLAN).values())[1:])) for name in ("p", "q"))
    assert rows.rates_done() == [] and rows.cells_done() == []
    cell = Cell(LEAST_LOADED, 2, 0.5)
    rows.add("rate", users=4, rate=1.0)
    rows.add("cell", **asdict(cell), latency=1.0)
    assert rows.rates_done() == [4] and rows.cells_done() == [cell]
    assert other.rates_done() == [] and other.cells_done() == []


def test_every_number_of_replicas_meets_every_share_and_policy_once() -> None:
    expected = {Cell(RANDOM, 1, share) for share in (0.5, 0.8)}
    expected |= {Cell(policy, n, share) for policy in (RANDOM, LEAST_LOADED) for n in (2, 3) for share in (0.5, 0.8)}
    found = cells((1, 2, 3), (0.5, 0.8))
    assert set(found) == expected and len(found) == len(expected)


def row(kind: str, **values: Any) -> dict[str, Any]:
    return json.loads(json.dumps({"kind": kind, **values, "plan": asdict(PLAN)}))


RATE_ROWS = [row("rate", users=n, rate=rate, error=0.01 * rate) for n, rate in RATES.items()]


def cell_row(policy: str, replicas: int, slower: float = 1.0) -> dict[str, Any]:
    """A cell as the model predicts it."""
    arrivals = 0.8 * 3.0 * replicas
    load = predict(Rates(RATES, 4), arrivals, replicas, policy)
    seconds = load.seconds * slower
    return row(
        "cell",
        **asdict(Cell(policy, replicas, 0.8)),
        **{"arrivals": arrivals, "requests": 99, "latency": seconds, "error": 0.1, "in_flight": seconds * arrivals},
        **{"completed": arrivals, "queue": load.waiting_seconds, "by_replica": [33] * replicas},
    )


def test_the_report_finds_the_model_right_where_it_is() -> None:
    right = [cell_row(RANDOM, 2), cell_row(LEAST_LOADED, 2)]
    text = "\n".join(compared(RATE_ROWS, right))
    assert text.endswith("2 of 2 within 90 % of the model's runs")
    assert "off by 0 % in the mean, 0 % at most" in text


def test_the_report_says_how_far_off_the_model_is() -> None:
    text = "\n".join(compared(RATE_ROWS, [cell_row(RANDOM, 2, slower=2.0)]))
    assert "| +100 % |" in text
    assert text.endswith("off by 100 % in the mean, 100 % at most; 0 of 1 within 90 % of the model's runs")


def test_a_report_before_the_first_cell_has_the_rates() -> None:
    text = "\n".join(report(RATE_ROWS, []))
    assert "| 2 | 1.80 | 0.02 |" in text and "within" not in text


def test_a_better_policy_and_more_replicas_never_lose() -> None:
    found = [line.split(" | ") for text in table(Rates(RATES, 4), (0.9,), (1, 8)) for line in text.splitlines()[2:]]
    alone, eight = ([float(cell[i].split(" (")[0]) for cell in found] for i in (2, 3))
    assert alone[0] == pytest.approx(eight[0]) == pytest.approx(alone[2])
    assert eight[0] > 1.3 * eight[1] > 1.3 * eight[2]


def test_more_than_all_can_do_has_no_steady_state() -> None:
    assert predict(Rates(RATES, 4), 7.0, 2, LEAST_LOADED).seconds == float("inf")
    assert predict(Rates(RATES, 4), 4.0, 2, RANDOM) == split_at_random(Rates(RATES, 4), 2.0)


def test_a_card_gives_the_best_block_at_each_concurrency() -> None:
    rates = card_rates("Qwen3.5-4B", "gsm8k", 1000.0)
    assert rates.slots == 32
    assert rates(1) == pytest.approx(1.386, rel=0.01) and rates.most == pytest.approx(17.5, rel=0.02)
    with pytest.raises(DFlashError, match="Qwen3-Coder-Next"):
        card_rates("Qwen3-Coder-Next", "humaneval", 1000.0)


def test_a_step_begins_when_the_one_before_has_had_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PLUGIN)
    from dflash_test_plugin import paced

    class Clock:
        now = 100.0

        def perf_counter(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    class Batch:
        def batch_size(self) -> int:
            return 4

    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    began: list[float] = []

    def step(worker: Any, batch: Batch) -> str:
        began.append(clock.now)
        clock.now += 0.03
        return "result"

    pace = paced.Pace(20, 60, 5)
    for kind in (pace.prefill, pace.decode, pace.decode, pace.prefill):
        assert kind(step, None, Batch()) == "result"
    assert began == pytest.approx([100.0, 100.03, 100.11, 100.19])
