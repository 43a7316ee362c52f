"""Every table has a cell under every heading."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from sglang_dflash.bench import tables
from sglang_dflash.bench.known_pairs import published_pairs
from sglang_dflash.bench.published import card_of, published_tables
from sglang_dflash.bench.summary import Summary
from tests.bench.records import comparison, provenance

STAGES = {"draft": 0.3, "verify": 0.6}


def summary_with_stage_times() -> Summary:
    """Records that fill every table and every column of it."""
    content = comparison()
    for run in content.runs:
        if run.worker is not None:
            run.worker["stage_seconds"].update(STAGES)
    return Summary(content)


def tables_of_published_figures() -> list[tables.Table]:
    """Measured in no cell that the cards have: every cell under "measured" is the mark of a missing figure."""
    found = []
    for name in published_pairs():
        content = comparison()
        content.provenance = [provenance(pair=name)]
        card = card_of(Summary(content))
        assert card is not None
        found += published_tables(Summary(content), card)
    return found


def test_every_table_has_a_cell_under_every_heading():
    of_bench = tables.all_tables(summary_with_stage_times())
    assert len(of_bench) == 6
    for table in [*of_bench, *tables_of_published_figures()]:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
        assert len({line.count("|") for line in table.markdown().splitlines()}) == 1, table.title


def test_a_ragged_table_is_refused():
    with pytest.raises(ValueError, match=r"Two cells: 1 cell\(s\) under 2 headings"):
        tables.Table("Two cells", "", ["a", "b"], [["1", "2"], ["3"]])


def test_the_csv_file_has_a_value_under_every_heading(tmp_path: Path):
    path = tmp_path / "rows.csv"
    summary_with_stage_times().write_csv(path)
    heading, *rows = csv.reader(path.read_text().splitlines())
    assert len(rows) == 2
    assert {len(row) for row in rows} == {len(heading)}
