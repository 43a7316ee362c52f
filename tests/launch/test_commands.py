"""What people run, as ``check`` judges it; and the flags that our own messages name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang_dflash
from sglang_dflash.check.flags import sglang_parser
from sglang_dflash.launch.old_flags import RENAMED
from tests.launch.commands import commands, judge

pytestmark = pytest.mark.sglang
OURS = {"--gpu", "--memory-gib", "--users", "--context", "--conversations"}
EVERYWHERE = {"--json", "--help", "--version", "--verbose"}
DOCKERS = {"--gpus"}


@pytest.mark.parametrize("command", commands(), ids=lambda command: command["run"][:60])
def test_a_command_of_a_user_is_judged_right(command: dict[str, Any]) -> None:
    verdict, exit_code, output = judge(command)
    assert verdict.startswith(command["verdict"]) and exit_code == command["exit"], output
    assert [text for text in command.get("has", ()) if text not in output] == []
    assert [text for text in command.get("lacks", ()) if text in output] == []


def test_no_message_names_a_flag_that_sglang_rejects() -> None:
    known = {*sglang_parser()._option_string_actions, *OURS, *EVERYWHERE, *DOCKERS, *RENAMED}
    for path in Path(sglang_dflash.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", node.value):
                    assert flag in known, f"{flag} in {path.name}, line {node.lineno}"
