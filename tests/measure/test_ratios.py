"""Ratios of arms within repeats."""

from __future__ import annotations

from pathlib import Path

from sglang_dflash_lab.measure.ratios import report
from tests.bench.runs import write


def test_a_ratio_is_taken_within_each_repeat_and_over_the_best_of_several_arms(tmp_path: Path) -> None:
    speeds = {"ar": [10.0, 20.0, 30.0], "dflash:8": [20.0, 40.0, 60.0], "dflash:16": [30.0, 80.0, 60.0]}
    write(tmp_path / "mine", speeds, dict.fromkeys(speeds, ["a"]))
    cells, means = report([tmp_path / "mine"], ["dflash:16/ar,dflash:8", "dflash:8/ar"])
    assert "| mine | math | 1 | 20 (–) | 40 (4.00) | 60 (4.00) | 1.50x [1.00, 2.00] | 2.00x [2.00, 2.00] |" in cells
    assert "| mine | math | dflash:16/ar,dflash:8 | 1.44x |" in means
