"""The width table: tokens in a span of time, what is still to be measured, a cell's clock, the promises' verdicts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from measure import width_table
from measure.width_arms import check_policy, parse_arms, server_of
from measure.width_criteria import medians, noise, over_best, over_builtin, over_one_block, report
from measure.width_load import Tokens, completion_tokens
from measure.width_table import Cell, missing
from sglang_dflash.bench.client import Sampling
from sglang_dflash.errors import DFlashError

CELL = Cell("tiny-hybrid", "noisy", "wild", 4)

STEPS = {"1": 30, "16": 10}


def row(arm: str, speed: float, cell: Cell = CELL, repeat: int = 0) -> dict[str, Any]:
    return {**vars(cell), "arm": arm, "repeat": repeat, "tokens": 2 * speed, "seconds": 2.0, "steps": STEPS}


def rows(cell: Cell = CELL, **speeds: float) -> list[dict[str, Any]]:
    return [row(arm.removeprefix("w").replace("_", ":"), speed, cell) for arm, speed in speeds.items()]


def test_an_arm_is_a_mode_of_a_server() -> None:
    assert parse_arms("plain,2,builtin:8,adaptive") == ["plain", "2", "builtin:8", "adaptive"]
    assert server_of("2") == server_of("16") == server_of("adaptive")
    assert [server_of(arm).kind for arm in ("plain", "builtin:8", "16")] == ["ar", "builtin", "adaptive"]
    assert server_of("builtin:8").size == 8
    for wrong in ("17", "0", "builtin", "wide"):
        with pytest.raises(DFlashError, match="a width up to 16"):
            parse_arms(f"plain,{wrong}")


def test_a_fixed_width_is_not_measured_as_adaptive() -> None:
    check_policy({"width": {"policy": "adaptive"}})
    for other in ({}, {"width": {"policy": "fixed"}}):
        with pytest.raises(DFlashError, match="Expected: 'adaptive'"):
            check_policy(other)


def test_tokens_come_evenly_between_two_events() -> None:
    tokens = Tokens(origin=10.0)
    tokens.add(10.0, 14.0, 8)
    tokens.add(12.0, 12.0, 3)
    assert tokens.between(0, 1) == 2
    assert tokens.between(1, 2) == 2  # an instant belongs to the span that it begins
    assert tokens.between(2, 3) == 2 + 3
    assert tokens.between(-5, 9) == 11


def test_the_count_is_found_whatever_the_text_says() -> None:
    event = {"text": '"completion_tokens": 5', "meta_info": {"completion_tokens": 41, "e2e": 1.5}}
    assert completion_tokens(json.dumps(event).encode()) == 41
    assert completion_tokens(json.dumps(event, separators=(",", ":")).encode()) == 41
    with pytest.raises(DFlashError, match="out of memory"):
        completion_tokens(b'{"error": "out of memory"}')


def test_finished_runs_are_skipped_and_repeats_alternate() -> None:
    done = [row("plain", 1.0), row("4", 1.0, repeat=1)]
    arms = ["plain", "4", "adaptive"]
    assert list(missing([CELL], arms, 3, done)) == [
        (CELL, 0, ["4", "adaptive"]),
        (CELL, 1, ["adaptive", "plain"]),
        (CELL, 2, arms),
    ]


@pytest.mark.parametrize("users", [1, 4, 32])
def test_a_cell_counts_while_all_users_are_busy(users: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell("tiny-hybrid", "good", "own", users)
    assert cell.answers - cell.warm_up >= 2 * users
    clock, busy, least_busy, finished = [0.0], 0, [], []

    class Client:
        async def events(self, input_ids: list[int], sampling: Sampling) -> AsyncIterator[tuple[float, bytes]]:
            """A token per second of the clock's, which moves when all requests have got theirs."""
            nonlocal busy
            busy += 1
            for count in range(1, sampling.max_tokens + 1):
                await asyncio.sleep(0)
                clock[0] += 1 / users
                yield clock[0], json.dumps({"meta_info": {"completion_tokens": count}}).encode()
                least_busy.append(busy)
            busy -= 1

    async def state(client: Any) -> dict[str, Any]:
        return {"sglang_dflash": {"steps_by_width": {"4": 10 + 5 * len(finished), "8": 2}}}

    async def finish(client: Any, tasks: list[asyncio.Task[None]]) -> None:
        finished.append(min(least_busy))
        await asyncio.gather(*tasks)

    monkeypatch.setattr(width_table, "internal_state", state)
    monkeypatch.setattr(width_table, "finish", finish)
    monkeypatch.setattr(width_table, "now", lambda: clock[0])
    result = asyncio.run(width_table.measure(Client(), [[1]] * cell.answers, cell, 32))
    assert result["steps"] == {"4": 5}
    assert result["tokens"] / result["seconds"] == pytest.approx(users, rel=0.05)
    assert result["tokens"] > 32 * users  # more than an answer of each user


def test_a_cells_speed_is_the_median_of_its_repeats() -> None:
    runs = [row("4", speed, repeat=repeat) for repeat, speed in enumerate((10, 50, 20))]
    assert medians(runs) == {tuple(vars(CELL).values()): {"4": 20.0}}


def test_the_noise_is_how_far_repeats_are_apart() -> None:
    runs = [row("4", speed, repeat=repeat) for repeat, speed in enumerate((100, 90, 110))]
    assert noise(runs) == pytest.approx(0.2)
    assert "are 20.0% apart" in "\n".join(report(runs))
    assert noise(runs[:1]) is None


def test_the_best_arm_is_one_of_ours() -> None:
    assert over_best({"plain": 100, "4": 200, "16": 50, "builtin:16": 900, "adaptive": 190}) == pytest.approx(0.95)
    assert over_best({"plain": 100, "4": 80, "adaptive": 99}) == pytest.approx(0.99)


def test_the_builtin_is_compared_where_drafting_pays_at_its_best_block() -> None:
    pays = {"plain": 100, "4": 150, "builtin:8": 120, "builtin:16": 80, "adaptive": 150}
    assert over_builtin(pays) == pytest.approx(1.25)
    assert over_builtin(pays | {"4": 90, "builtin:8": 104}) is None
    assert over_builtin(pays | {"4": 90, "builtin:8": 106}) is not None
    assert over_builtin({"plain": 100, "4": 150, "adaptive": 150}) is None


def test_the_single_block_is_the_best_over_all_cells() -> None:
    cells = [{"2": 10, "16": 40, "adaptive": 40}, {"2": 10, "16": 1, "adaptive": 10}]
    block, gain = over_one_block(cells)
    assert (block, gain) == ("2", pytest.approx(2.0))


def test_the_verdict_names_the_cells_that_break_a_promise() -> None:
    other = Cell("tiny-hybrid", "good", "own", 1)
    good = rows(other, plain=100, w4=200, w16=300, builtin_16=200, adaptive=300)
    bad = rows(plain=100, w4=90, w16=50, builtin_16=50, adaptive=96)
    text = "\n".join(report(good + bad))
    assert "| tiny-hybrid | good | own | 1 | 100 | 200 | 300 | 200 | 300 | 4.8 | 1.00x | 3.00x | 1.50x |" in text
    assert "adaptive >= 0.97x of the best arm: 1 of 2 cells, worst 0.96x\n  tiny-hybrid noisy wild 4: 0.96x" in text
    assert "adaptive >= 0.98x of the plain: 1 of 2 cells" in text
    assert "where drafting pays: 1 of 1 cells" in text
    assert "best single block (4), geometric mean: 1.26x" in text


def test_a_cell_that_lacks_arms_is_shown_and_not_judged() -> None:
    other = Cell("tiny-hybrid", "good", "own", 1)
    text = "\n".join(report(rows(plain=100, w4=90, adaptive=50) + rows(other, plain=10)))
    assert "| tiny-hybrid | good | own | 1 | 10 | - | - | - | - | - | - |" in text
    assert "1 of 2 cells lack arms" in text
    assert "best arm: 0 of 1 cells" in text
