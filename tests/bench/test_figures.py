"""Figures, warnings and the report from the rows of a results file."""

from __future__ import annotations

import math
from pathlib import Path

from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.figures import Summary, conclusion, speed_up, tables, warnings
from sglang_dflash_lab.bench.load import Cell
from sglang_dflash_lab.bench.report import write_report

SETTINGS = {"pair": "tiny-hybrid", "target": "t", "drafter": "d", "modes": [], "num_prompts": 2, "max_tokens": 8}
PROVENANCE = {
    "settings": {**SETTINGS, "temperature": 0.0},
    "command": "sglang-dflash bench",
    "time": "now",
    "commit": "abc",
    "versions": {"sglang": "0", "sglang-dflash": "0"},
    "hardware": {"cpu": "c", "cores": 2, "memory_gib": 1.0, "gpus": []},
    "environment": {},
}
TIMES = dict.fromkeys(("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"), 5.0)


PLAIN = {"worker": {}, "accept_length": None, "accept_lengths": [0, 0]}
DRAFTED = {"worker": {"steps_by_width": {"16": 3, "8": 1}}, "accept_length": 4.0, "accept_lengths": [5, 0]}


def write(folder: Path, speeds: dict[str, list[float]], texts: dict[str, list[str]]) -> None:
    """Write a results file: each mode's tokens/s by repeat, and its answers."""
    results.append(folder, "provenance", PROVENANCE)
    for mode, values in speeds.items():
        seen = {"generated_texts": texts[mode], **(PLAIN if mode == "ar" else DRAFTED)}
        for repeat, speed in enumerate(values):
            figures = {"output_throughput": speed, "duration": 1.0, "load_average": 0.5, **TIMES}
            results.append(folder, "run", {**vars(Cell(mode, "math", 1, repeat)), **figures, **seen})


SPEEDS = {"ar": [100.0, 110.0, 90.0], "dflash:16": [200.0, 240.0, 190.0]}
SAME = {"ar": ["one", "two"], "dflash:16": ["one", "two"]}


def test_a_speed_up_is_the_ratio_of_medians_over_shared_repeats_with_its_interval() -> None:
    ratio, low, high = speed_up({0: 20, 1: 22, 2: 18, 7: 1}, {0: 10, 1: 11, 2: 9})
    assert ratio == low == high == 2  # every repeat has the same ratio, so resampling in pairs moves nothing
    ratio, low, high = speed_up({0: 20, 1: 20, 2: 30}, {0: 10, 1: 10, 2: 10})
    assert (ratio, low, high) == (2, 2, 3) == speed_up({0: 20, 1: 20, 2: 30}, {0: 10, 1: 10, 2: 10})
    ratio, low, high = speed_up({0: 20, 1: 22}, {0: 10, 1: 11})
    assert ratio == 2 and math.isnan(low) and math.isnan(high)
    assert all(map(math.isnan, speed_up({0: 20}, {1: 10})))


def test_the_figures_of_a_cell(tmp_path: Path) -> None:
    write(tmp_path, SPEEDS, SAME)
    row = Summary(tmp_path).rows["dflash:16", "math", 1]
    assert (row.throughput, row.speed_up, row.repeats, row.spread) == (200, 2, 3, 0.25)
    assert (row.accept, row.card_accept, row.width, row.equal, row.compared) == (4, 5, 14, 6, 6)
    throughput, details = tables(Summary(tmp_path))
    assert throughput.rows[0][:3] == ["math", "1", "100.0"]
    assert throughput.rows[0][3].startswith("200.0 (2.00x [")
    assert details.rows[1][details.columns.index("as cards")] == "5.00" and details.rows[1][-1] == "6 / 6"
    assert list(warnings(Summary(tmp_path))) == []
    said = "dflash:16 over plain decoding: 2.0x for 1 user, 6 of 6 answers identical"
    assert list(conclusion(Summary(tmp_path))) == [said]
    assert said in write_report(tmp_path).read_text()


def test_answers_that_differ_and_slower_arms_are_reported_first(tmp_path: Path) -> None:
    slower = {**SPEEDS, "dflash:16": [80.0, 85.0, 75.0]}
    write(tmp_path, slower, {**SAME, "dflash:16": ["one", "2"]})
    differ, slow = warnings(Summary(tmp_path))
    assert differ == "dflash:16: 3 of 6 answers differ from plain decoding's"
    assert slow.startswith("dflash:16 is slower than plain decoding: math at c=1 (0.8")
    page = write_report(tmp_path).read_text()
    assert page.index(differ.replace("'", "&#39;")) < page.index(slow) < page.index("<table>")
