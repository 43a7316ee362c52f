"""What people run, as ``check`` judges it; and the flags that our own messages name."""

from __future__ import annotations

import ast
import re
import shlex
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

pytest.importorskip("sglang")

import sglang_dflash
from sglang_dflash.check.cli import app
from sglang_dflash.check.flags import sglang_parser
from sglang_dflash.hooks.flags import RENAMED
from tests.plan.commands import commands, models

pytestmark = pytest.mark.sglang
OURS = {"--gpu", "--memory-gib", "--users", "--context", "--conversations"}
EVERYWHERE = {"--json", "--help", "--version", "--verbose"}
DOCKERS = {"--gpus"}


@pytest.mark.parametrize("command", commands(), ids=lambda command: command["run"][:60])
def test_a_command_of_a_user_is_judged_right(command: dict[str, Any]) -> None:
    words = shlex.split(command["run"].replace('"', '\\"'))
    environment = dict(word.split("=", 1) for word in words if word.startswith("SGLANG_"))
    with chdir(models()):
        result = CliRunner().invoke(app, ["check", *words[len(environment) :]], env=environment)
    verdict = re.search("FITS|SHORT OF|DOES NOT|COMPATIBLE|REFUSED|SGLANG'S", result.stdout)
    assert verdict is not None and result.stdout[verdict.start() :].startswith(command["verdict"]), result.stdout
    assert result.exit_code == command["exit"]
    assert [text for text in command.get("has", ()) if text not in result.stdout] == []
    assert [text for text in command.get("lacks", ()) if text in result.stdout] == []


def test_no_message_names_a_flag_that_sglang_rejects() -> None:
    known = {*sglang_parser()._option_string_actions, *OURS, *EVERYWHERE, *DOCKERS, *RENAMED}
    for path in Path(sglang_dflash.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", node.value):
                    assert flag in known, f"{flag} in {path.name}, line {node.lineno}"
