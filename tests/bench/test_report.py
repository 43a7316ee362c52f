"""A report shows what went wrong, stands alone, and says where its figures come from."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_dflash.drafter.published import published_pairs
from sglang_dflash_lab.bench import results
from sglang_dflash_lab.bench.published import card_of, mode_of, published_tables
from sglang_dflash_lab.bench.report import write_report
from sglang_dflash_lab.bench.summary import Summary
from sglang_dflash_lab.bench.tables import all_tables
from sglang_dflash_lab.bench.warnings import findings
from tests.bench.records import comparison, provenance


def _write(folder: Path, content: results.Results) -> None:
    results.append(folder, "provenance", content.provenance)
    for run in content.runs:
        results.append_run(folder, run, [r for r in content.requests if r.run == run.run])


def inaccurate() -> results.Results:
    content = comparison()
    content.requests = [replace(r, correct=r.run.mode == "ar") for r in content.requests]
    return content


def busy() -> results.Results:
    content = comparison()
    content.provenance = [provenance(cores=0)]
    return content


@pytest.mark.parametrize(
    ("content", "serious", "said"),
    [
        (comparison(dflash_output=(1, 2, 7, 4)), True, "3 of 6 answers differ"),
        (comparison(dflash_output=(1, 2, 7, 4)), True, "output token 2"),
        (comparison(dflash_wall_s=2.0), True, "slower than plain decoding: math at c=1 (0.50x)"),
        (inaccurate(), True, "dflash:16 answers math at c=1 right in 0 %, plain decoding in 100 %"),
        (busy(), False, ""),
    ],
)
def test_what_went_wrong_is_found(content: results.Results, serious: bool, said: str):
    (finding,) = findings(Summary(content))
    assert finding.serious == serious
    assert said in finding.text


def test_every_table_has_a_cell_under_every_heading():
    """Also those of the published figures, of which these records measure none."""
    content = comparison()
    for run in content.runs:
        if run.worker is not None:
            run.worker["stage_seconds"].update({"draft": 0.3, "verify": 0.6})
    tables = all_tables(Summary(content))
    assert len(tables) == 6
    for name in published_pairs():
        content.provenance = [provenance(pair=name)]
        tables += published_tables(Summary(content), card_of(Summary(content)))
    for table in tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}, table.title
        assert len({line.count("|") for line in table.markdown().splitlines()}) == 1, table.title


def test_the_page_stands_alone_and_names_its_source(tmp_path: Path):
    _write(tmp_path, comparison())
    page = write_report(tmp_path).read_text()
    assert "sglang-dflash bench --pair x" in page
    assert "16.0 (2.00x [2.00, 2.00])" in page
    assert re.findall(r'(?:src|href)="(?!data:image/png;base64,)', page) == []
    assert "<script" not in page
    for name in ("speed_up", "accept_length", "accept_histogram", "latency"):
        assert f'id="{name}"' in page
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    tables = (tmp_path / "tables.md").read_text()
    assert tables.startswith("```bash\nsglang-dflash bench --pair x\n```")
    assert "| math | 1 | 8.0 | 16.0 (2.00x [2.00, 2.00]) |" in tables
    header, *rows = (tmp_path / "summary.csv").read_text().splitlines()
    assert header.startswith("mode,task,concurrency")
    assert len(rows) == 2


def test_text_of_the_results_cannot_become_markup(tmp_path: Path):
    content = comparison()
    content.provenance[0]["command"] = "<b>bench</b>"
    _write(tmp_path, content)
    assert "&lt;b&gt;bench" in write_report(tmp_path).read_text()


def test_the_cards_figures_stand_beside_ours():
    content = comparison()
    content.provenance = [provenance(pair="Qwen3.5-4B")]
    for r in content.requests:
        object.__setattr__(r.run, "task", "gsm8k")
    for run in content.runs:
        object.__setattr__(run.run, "task", "gsm8k")
    summary = Summary(content)
    card = card_of(summary)
    assert card is not None
    speed, accept = published_tables(summary, card)
    assert ["dflash:16", "gsm8k", "1", "16.0", "2.00x", "1387.4", "3.90x"] in speed.rows
    assert ["dflash:16", "gsm8k", "4.00", "6.75"] in accept.rows
    assert "B200" in speed.caption


@pytest.mark.parametrize("name", published_pairs())
def test_published_speed_ups_are_the_ratio_of_the_published_throughputs(name: str):
    """Catches a figure typed into the wrong row; cards round to one digit."""
    rows = published_pairs()[name]["speed"]
    plain = {(r["task"], r["concurrency"]): r["tokens_per_s"] for r in rows if r["arm"] == "ar"}
    for r in rows:
        ratio = r["tokens_per_s"] / plain[r["task"], r["concurrency"]]
        assert r["speedup"] == pytest.approx(ratio, abs=0.07), (mode_of(r), r)
