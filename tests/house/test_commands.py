"""``sglang-dflash --help`` lists the commands in the order of use, and the help of each has an example to paste."""

from __future__ import annotations

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.check.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "Makefile", *(ROOT / "docs").rglob("*.md")]


def shown(*words: str) -> str:
    ended = CliRunner().invoke(app, words)
    assert ended.exit_code == 0, ended.output
    return ended.output


MODULES = sorted(
    module
    for module in {found for page in PAGES for found in re.findall(r"python -m ([\w.]+)", page.read_text())}
    if module.partition(".")[0] in ("tests", "tools", "sglang_dflash_cpu", "sglang_dflash_lab")
)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_that_the_pages_run_prints_its_help_and_does_nothing_else(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    with pytest.raises(SystemExit) as ended, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runpy, of a module that another test has imported
        runpy.run_module(module, run_name="__main__")
    assert ended.value.code in (None, 0)
    assert "usage: " in capsys.readouterr().out.lower()
