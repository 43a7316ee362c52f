"""Launch commands of DFLASH users (``tests/fixtures/commands``), and the verdict of ``check`` on one."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from sglang_dflash.check.cli import app
from tests.support.cards import FOLDER as CARDS

FOLDER = Path(__file__).parents[1] / "fixtures" / "commands"
TEXTS = {"tokenizer.json": '{"model": {"vocab": {}}}', "chat_template.jinja": "{{ messages }}"}


def commands() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "commands.yaml").read_text())
    return found


@cache
def models() -> Path:
    """The configurations, those of the cards too, with a tokenizer and a chat template for each target."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    sources = {each.name: each for each in FOLDER.iterdir() if each.is_dir()}
    for card in (each for each in CARDS.iterdir() if each.is_dir()):
        sources |= {card.name: card / "target", f"{card.name}-DFlash": card / "drafter"}
    for name, source in sources.items():
        shutil.copytree(source, folder / name)
        if "dflash" not in name.lower():
            for file, text in TEXTS.items():
                (folder / name / file).write_text(text)
    return folder


def judge(command: dict[str, Any]) -> tuple[str, int, str]:
    """Return the verdict, the exit status and the whole output of ``check``."""
    words = shlex.split(command["run"].replace('"', '\\"'))
    environment = dict(word.split("=", 1) for word in words if word.startswith("SGLANG_"))
    with chdir(models()):
        result = CliRunner().invoke(app, ["check", *words[len(environment) :]], env=environment)
    verdict = re.search("(FITS|SHORT OF|DOES NOT|COMPATIBLE|REFUSED|SGLANG'S).*", result.stdout)
    assert verdict is not None, result.stdout
    return verdict[0], result.exit_code, result.stdout
