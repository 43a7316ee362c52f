"""Every broken pair is one error of ``check``, with value, expectation and remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sglang_dflash.cli import app
from tests.support.broken_pairs import BROKEN, Broken, write_pair

FITS = Broken("", "")


def check(folder: Path, *flags: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    pair = (str(folder / "target"), str(folder / "drafter"))
    result = CliRunner().invoke(app, ["check", *pair, "--json", *flags])
    return result.exit_code, json.loads(result.stdout)


def test_the_pair_they_start_from_fits(tmp_path: Path) -> None:
    write_pair(tmp_path, FITS)
    code, report = check(tmp_path)
    assert code < 2
    assert [found for found in report["findings"] if found["level"] == "error"] == []


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_pair_is_an_error_that_says_what_to_do(broken: Broken, tmp_path: Path) -> None:
    write_pair(tmp_path, broken)
    code, report = check(tmp_path, *broken.flags)
    errors = [found for found in report["findings"] if found["level"] == "error"]
    assert code == 2
    assert any(broken.names in found["value"] for found in errors), errors
    assert all(found["expected"] and found["remedy"] for found in errors)
