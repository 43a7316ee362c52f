"""``sglang-dflash pairs``: what it prints, and that finding a pair needs no PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys

from typer.testing import CliRunner

from sglang_dflash_lab.pairs import NAMES, drafter_kinds
from sglang_dflash_lab.pairs.cli import app
from sglang_dflash_lab.pairs.corpus import TASKS, check

run = CliRunner().invoke


def test_an_unknown_pair_or_drafter_is_refused_with_the_known_ones() -> None:
    for words, known in ((["tiny-huge"], "tiny-hybrid"), (["tiny-dense", "--drafter", "swa"], "good")):
        result = run(app, ["path", *words])
        assert result.exit_code == 2 and known in result.stderr


def test_prompts_prints_checkable_prompts_as_json() -> None:
    result = run(app, ["prompts", "tiny-hybrid", "--task", "json", "-n", "5", "--json"])
    printed = json.loads(result.output)
    assert len(printed) == 5
    assert all(p["messages"][-1]["role"] == "user" for p in printed)
    assert all(check("json", p["expected"], p["answer"]) for p in printed)


def test_list_prints_every_pair_and_drafter() -> None:
    header, *rows = (line.split() for line in run(app, ["list"]).output.splitlines())
    assert header == ["pair", "model", "MB", *TASKS]
    assert [tuple(row[:2]) for row in rows] == [(n, m) for n in NAMES for m in ("target", *drafter_kinds(n))]
    assert all(float(row[2]) > 0.5 and len(row) == len(header) for row in rows)


def test_finding_a_pair_imports_no_torch() -> None:
    program = (
        "import sys; from typer.testing import CliRunner; from sglang_dflash_lab.pairs.cli import app\n"
        "for words in ('path tiny-hybrid', 'list', 'prompts tiny-hybrid --task math'):\n"
        "    assert CliRunner().invoke(app, words.split()).exit_code == 0, words\n"
        "assert not {'torch', 'transformers', 'sglang'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
