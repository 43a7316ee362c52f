"""``make gpu``'s rows and tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.gpu import records, tables
from tools.gpu.run_step import Run
from tools.gpu.steps import kernels, profile

PAGE = """# Page

<!-- measure: make gpu STEPS=steptimes -->
old
<!-- end -->

between
"""


def step_rows(out: Path, device: str) -> None:
    for arm, times in (("builtin", [4.0, 5.0, 4.5]), ("ours", [3.0, 3.5, 3.6])):
        row = {"pair": "P", "arm": arm, "layers": 0, "batch": 8, "step_ms": times}
        records.append(out, "steptimes", {"device": device, **row})


def test_a_page_without_rows_says_that_nothing_was_measured(tmp_path: Path) -> None:
    assert "| not measured |" in tables.filled(PAGE, tmp_path)


def test_what_a_faked_device_wrote_is_no_result(tmp_path: Path) -> None:
    step_rows(tmp_path, "fake")
    assert tables.filled(PAGE, tmp_path) == tables.filled(PAGE, tmp_path / "empty")


def test_step_times_of_both_workers_stand_beside_each_other(tmp_path: Path) -> None:
    step_rows(tmp_path, "cuda")
    page = tables.filled(PAGE, tmp_path)
    cell = "3.50 [3.00, 3.60] / 4.50 [4.00, 5.00] = 0.78"
    assert f"| pair | batch 8 |\n| --- | --- |\n| P | {cell} |\n<!-- end -->\n\nbetween\n" in page
    assert "old" not in page
    assert tables.filled(page, tmp_path) == page


def test_the_shipped_page_has_every_table() -> None:
    page = (Path(__file__).parents[2] / "docs/results/gpu.md").read_text()
    assert [found[2] for found in tables.PLACE.finditer(page)] == list(tables.TABLES)


def test_the_page_stays_short_when_everything_is_measured(tmp_path: Path) -> None:
    """100 lines, as tests/house/test_docs.py has it, with the rows that a whole run writes."""
    pairs, tiny = [f"Q{n}" for n in range(5)], ["tiny-dense", "tiny-hybrid", "tiny-moe"]
    machine = dict.fromkeys(("gpu", "driver", "cuda", "python", "commit"), "x")
    packages = dict.fromkeys(("torch", "triton", "sglang", "sglang-dflash"), "1")
    memory = dict.fromkeys(("target_weights", "drafter_weights", "target_kv", "draft_kv", "states", "scratch"), 1 << 20)
    rows: dict[str, list[records.Row]] = {
        "machine": [machine | {"packages": packages}],
        "kernels": [{"kernel": str(n), "cases": 9, "failed": n % 2} for n in range(8)],
        "engine": [{"pair": p, "arm": str(n), "texts": 64, "near_ties": 1, "wrong": 0} for p in tiny for n in range(5)],
        "nosync": [{"pair": p, "requests": str(n), "tokens": 9} for p in tiny for n in range(3)],
        "memory": [{"pair": p, "memory_bytes": memory, "sum": 6 << 20, "taken": 7 << 20} for p in tiny],
        "sanitizer": [{"tool": tool, "errors": 0} for tool in ("memcheck", "racecheck")],
        "steptimes": [
            {"pair": p, "arm": arm, "layers": 0, "batch": 1 << n, "step_ms": [1.0]}
            for p in pairs for arm in ("ours", "builtin") for n in range(7)
        ],
        "profile": [{"pair": p, "arm": "ours", "trace": "t", "mib": 1.0, "kernels_ms": {"k": 1.0}} for p in pairs],
    }  # fmt: skip
    assert rows.keys() == tables.TABLES.keys()
    for step, each in rows.items():
        for row in each:
            records.append(tmp_path, step, {"device": "cuda", **row})
    page = tables.filled((Path(__file__).parents[2] / "docs/results/gpu.md").read_text(), tmp_path)
    assert tables.NOT_MEASURED not in page
    assert len(page.splitlines()) <= 100


def test_the_line_that_a_killed_run_cut_off_is_left_out(tmp_path: Path) -> None:
    records.append(tmp_path, "engine", {"pair": "a"})
    with (tmp_path / "engine.jsonl").open("a") as file:
        file.write('{"pair": "b", "te')
    assert records.read(tmp_path, "engine") == [{"pair": "a"}]


def test_a_later_row_stands_for_an_earlier_one() -> None:
    rows = [{"a": 1, "v": 0}, {"a": 2, "v": 1}, {"a": 1, "v": 2}]
    assert records.latest(rows, "a") == [{"a": 1, "v": 2}, {"a": 2, "v": 1}]


def test_a_measurement_that_fails_is_a_row_and_is_repeated_by_the_next_run(tmp_path: Path) -> None:
    run = Run("cpu", tmp_path, "memory")

    def broken() -> dict[str, object]:
        raise RuntimeError("no server")

    assert not run.measure({"pair": "a"}, broken)
    assert records.read(tmp_path, "memory")[0]["error"] == "RuntimeError: no server"
    assert run.measure({"pair": "a"}, lambda: {"sum": 1})
    assert run.measure({"pair": "a"}, broken)  # it has been measured: not again
    assert len(records.read(tmp_path, "memory")) == 2


def test_kernels_are_counted_by_name() -> None:
    report = """<testsuites><testsuite>
      <testcase name="test_accept_block[1-2]"/>
      <testcase name="test_accept_block[6-1]"><failure message="far"/></testcase>
      <testcase name="test_norm_rope"/></testsuite></testsuites>"""
    passed, failed, first = kernels.results(report)
    assert (passed, failed) == ({"accept_block": 1, "norm_rope": 1}, {"accept_block": 1})
    assert first == {"accept_block": "test_accept_block[6-1]: far"}


def test_a_trace_is_summed_by_kernel_and_stage() -> None:
    events = [
        {"cat": "kernel", "name": "gemm", "dur": 1500},
        {"cat": "kernel", "name": "gemm", "dur": 500},
        {"cat": "user_annotation", "name": "dflash.draft", "dur": 250},
        {"cat": "user_annotation", "name": "other", "dur": 250},
        {"ph": "M", "name": "process_name"},
    ]
    assert profile.summary(events) == {"kernels_ms": {"gemm": 2.0}, "stages_ms": {"dflash.draft": 0.25}}


@pytest.mark.parametrize("device", ["cuda", "fake", "cpu"])
def test_a_device_gets_the_flags_that_it_needs(device: str, tmp_path: Path) -> None:
    flags = Run(device, tmp_path, "engine").flags(speculative=True)
    assert ("--attention-backend" in flags) == (device != "cpu")
    assert ("--disable-cuda-graph" in flags) == (device == "fake")
    assert "--speculative-draft-attention-backend" not in Run(device, tmp_path, "engine").flags(speculative=False)
