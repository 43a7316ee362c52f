"""``make gpu``'s rows, and the page made of them."""

from __future__ import annotations

from pathlib import Path

from tools.gpu import records, runner, tables
from tools.gpu.run_step import Run


def test_only_a_real_device_has_a_page(tmp_path: Path) -> None:
    records.append(tmp_path, "sanitizer", {"device": "cpu", "tool": "memcheck", "errors": 0})
    assert tables.page(tmp_path) is None


def test_every_step_has_its_section(tmp_path: Path) -> None:
    machine = dict.fromkeys(("gpu", "driver", "cuda", "python", "commit"), "x")
    packages = dict.fromkeys(("torch", "triton", "sglang", "sglang-dflash"), "1")
    memory = dict.fromkeys(("target_weights", "drafter_weights", "target_kv", "draft_kv", "states", "scratch"), 1 << 20)
    times = {"pair": "P", "layers": 0, "batch": 8}
    arm = {"pair": "P", "arm": "graphs", "backend": "triton", "texts": 64, "near_ties": 1, "wrong": 0, "accept": 4.0}
    started = {"start_seconds": 40.0, "steps": 200, "step_ms": 9.5, "states": "replayed", "accept": 4.0}
    rows: dict[str, list[records.Row]] = {
        "machine": [machine | {"packages": packages}],
        "kernels": [{"kernel": "accept_block", "cases": 9, "failed": 1}],
        "replay": [{"pair": "P", "arm": "plain", "tokens_per_second": 9.0}, arm],
        "card": [{"pair": "P", "memory_bytes": memory, "sum": 6 << 20, "taken": 7 << 20, **started}],
        "steptimes": [{**times, "arm": "builtin", "step_ms": [4, 5]}, {**times, "arm": "ours", "step_ms": [3, 4]}],
        "nosync": [{"pair": "P", "tokens": {"greedy": 9, "seeded": 8}}, {"pair": "Q", "error": "x"}],
        "profile": [{"pair": "P", "arm": "ours", "trace": "t", "mib": 1.0, "kernels_ms": {"k": 1.0}}],
        "engine": [{"pair": "P", "arm": "plain", "tokens_per_second": 9.0}, arm],
        "memory": [{"pair": "P", "memory_bytes": memory, "sum": 6 << 20, "taken": 7 << 20}],
        "sanitizer": [{"tool": "memcheck", "errors": 3}, {"tool": "memcheck", "errors": 0}],
    }  # fmt: skip
    assert list(rows) == list(tables.SECTIONS) == list(runner.BUDGETS)
    for step, each in rows.items():
        for row in each:
            records.append(tmp_path, step, {"device": "cuda", **row})
    page = tables.page(tmp_path)
    assert page is not None and page.count("\n## ") == len(rows)
    for line in (
        "| accept_block | 9 | 1 |",
        "| graphs | 64 texts, 1 near-ties, 0 wrong, accept length 4.00 |",
        "| P | 40.00 | 200 | 9.50 | replayed | 4.00 |",
        "| P | greedy 9 tokens, seeded 8 tokens |\n| Q | error |",
        "| P | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 6.00 | 7.00 |",
        "| --- | --- | --- |\n| memcheck | 0 | - |\n",
        "| pair | batch 8 |\n| --- | --- |\n| P | 3.50 [3.00, 4.00] / 4.50 [4.00, 5.00] = 0.78 |\n",
    ):
        assert line in page


def test_a_failed_measurement_is_recorded_and_repeated_by_the_next_run(tmp_path: Path) -> None:
    run = Run("cpu", tmp_path, "memory")

    def broken() -> dict[str, object]:
        raise RuntimeError("no server")

    assert not run.measure_each([({"pair": "a"}, broken), ({"pair": "b"}, lambda: {"sum": 1})])
    failed, passed = records.read(tmp_path, "memory")
    assert failed["error"].startswith(__file__) and failed["error"].endswith("RuntimeError: no server")
    assert "error" not in passed
    assert run.measure({"pair": "a"}, lambda: {"sum": 1})
    assert run.measure({"pair": "a"}, broken)  # measured before: not again
    assert len(records.read(tmp_path, "memory")) == 3
