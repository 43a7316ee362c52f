"""The equality matrix is whole, and its record counts what this very package passed and nothing else."""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.pairs import NAMES, drafter_kinds
from tests.support.matrix import FIXED, MATRIX, PAGED, RANDOM, RETRACTED, SYNC, WINDOW, Record


def record(file: Path, key: str) -> Record:
    found = Record(file)
    found.__dict__["key"] = key  # in place of the package's hash
    return found


def test_every_drafter_at_every_block_size() -> None:
    wanted = {(pair, drafter, block) for pair in NAMES for drafter in drafter_kinds(pair) for block in (16, 8, 4, 2)}
    assert {(cell.pair, cell.drafter, cell.block) for cell in FIXED} == wanted
    assert len({str(cell) for cell in MATRIX}) == len(MATRIX) == 28 + 26


def test_random_widths_meet_every_way_to_schedule() -> None:
    assert {cell.pair for cell in RANDOM} == {"tiny-hybrid", "tiny-moe", "tiny-dense"}
    met = {argument for cell in RANDOM for argument in cell.arguments}
    assert {*SYNC, "no_buffer", "extra_buffer_lazy", "--enable-mixed-chunk", *PAGED, *WINDOW} <= met
    assert any(cell.environment == RETRACTED for cell in RANDOM)


def test_a_run_goes_on_and_a_changed_package_starts_over(tmp_path: Path) -> None:
    file = tmp_path / "cache" / "matrix.jsonl"
    assert record(file, "one").results() == {}
    record(file, "one").add("a cell", 28)
    record(file, "one").add("a pair", [[1, 2]])
    assert record(file, "one").results() == {"a cell": 28, "a pair": [[1, 2]]}
    assert record(file, "another").results() == {}
