"""Launch commands of DFLASH users (``tests/fixtures/commands``), and what ``check`` says of them."""

from __future__ import annotations

import re
import shlex
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner

from sglang_dflash.check.cli import app

FOLDER = Path(__file__).parents[1] / "fixtures" / "commands"
TEXTS = {"tokenizer.json": '{"model": {"vocab": {}}}', "chat_template.jinja": "{{ messages }}"}


def commands() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load((FOLDER / "commands.yaml").read_text())
    return found


@cache
def models() -> Path:
    """The configurations, with a tokenizer and a chat template for each target."""
    folder = Path(tempfile.mkdtemp(prefix="commands-"))
    for model in FOLDER.iterdir():
        if model.is_dir():
            shutil.copytree(model, folder / model.name)
            if "dflash" not in model.name:
                for name, text in TEXTS.items():
                    (folder / model.name / name).write_text(text)
    return folder


def judged(command: dict[str, Any]) -> tuple[str, int, str]:
    """Return the verdict, the exit status and the whole output."""
    words = shlex.split(command["run"].replace('"', '\\"'))
    environment = dict(word.split("=", 1) for word in words if word.startswith("SGLANG_"))
    target, drafter, *flags = words[len(environment) :]
    with chdir(models()):
        result = CliRunner().invoke(app, ["check", target, drafter, *flags], env=environment)
    verdict = re.search("FITS|SHORT OF|DOES NOT|COMPATIBLE|REFUSED|SGLANG'S", result.stdout)
    return result.stdout[verdict.start() if verdict else 0 :].partition("\n")[0], result.exit_code, result.stdout


def faults(command: dict[str, Any]) -> Iterator[str]:
    """Yield what differs from what the command's row expects."""
    verdict, status, output = judged(command)
    if not verdict.startswith(command["verdict"]):
        yield f"verdict {verdict!r}"
    if status != command["exit"]:
        yield f"exit {status}"
    yield from (f"without {text!r}" for text in command.get("has", ()) if text not in output)
    yield from (f"with {text!r}" for text in command.get("lacks", ()) if text in output)
