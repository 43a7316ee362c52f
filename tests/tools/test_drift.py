"""What another SGLang release lacks, by name; here a small one, made for the test."""

from __future__ import annotations

from pathlib import Path

from tests.house.contract import Symbol
from tools import drift


def test_missing_names_and_parameters_are_found(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/spec.py").write_text("def verify(block, width=4): ...\n")
    (tmp_path / "sglang/broken.py").write_text("raise RuntimeError('no device')\n")
    symbols = [
        Symbol("sglang.spec.verify", ("block",)),
        Symbol("sglang.spec.verify", ("block", "rank")),
        Symbol("sglang.spec.gone"),
        Symbol("sglang.broken.name"),
    ]
    assert drift.install(str(tmp_path)) == tmp_path  # a checkout's folder is not downloaded
    assert drift.problems(symbols[:1], tmp_path) == {}
    assert drift.problems(symbols[1:], tmp_path) == {
        "sglang.spec.verify": "parameters ['rank'] not in (block, width)",
        "sglang.spec.gone": "not found (module 'sglang.spec' has no attribute 'gone')",
        "sglang.broken.name": "cannot be imported (RuntimeError: no device)",
    }
