"""What people run, as ``check`` judges it; and the flags that our own messages name."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import sglang_dflash
from sglang_dflash.check.flags import sglang_parser
from sglang_dflash.launch import resolution
from sglang_dflash.launch.device import CPU
from sglang_dflash.launch.launch import Launch
from sglang_dflash.launch.old_flags import RENAMED
from tests.launch.commands import commands, judge, models
from tests.support.cards import NAMES, card
from tests.support.configs import RULES, settings

pytestmark = pytest.mark.sglang
LEVELS = {"note", "warn", "error", "level"}
OURS = {"--gpu", "--memory-gib", "--users", "--context", "--conversations"}
PAIR = {"--model-path", "--speculative-algorithm", "--speculative-draft-model-path"}
EVERYWHERE = {"--json", "--help", "--version", "--verbose"}
DOCKERS = {"--gpus"}


@pytest.mark.parametrize("command", commands(), ids=lambda command: command["run"][:60])
def test_a_command_of_a_user_is_judged_right(command: dict[str, Any]) -> None:
    verdict, exit_code, output = judge(command)
    assert verdict.startswith(command["verdict"]) and exit_code == command["exit"], output
    assert [text for text in command.get("has", ()) if text not in output] == []
    assert [text for text in command.get("lacks", ()) if text in output] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_flag_and_variable_of_a_card_is_in_a_command(name: str) -> None:
    printed = card(name)
    given = {word.partition("=")[0] for command in commands() if f" {name}-DFlash " in command["run"]
             for word in command["run"].split()}  # fmt: skip
    flags = {word for word in printed.arguments if word.startswith("--")} - PAIR
    assert flags | printed.environment.keys() <= given


NO_SUBJECT = r"(the target has none|none\b|served\b|\{[^{}]*\} at once)"


def test_every_finding_reads_as_a_sentence_after_its_title(caplog: pytest.LogCaptureFixture) -> None:
    found = [
        call
        for path in Path(sglang_dflash.__path__[0]).rglob("*.py")
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in LEVELS and call.args
    ]
    sentences = [ast.unparse(call.args[0]).lstrip("f'\"") for call in found]
    assert len(found) > 40 and [each for each in sentences if re.match(NO_SUBJECT, each)] == []
    # the server logs title and finding: one without a title must be a whole sentence
    pair = {"model_path": "qwen3-8b", "speculative_draft_model_path": "qwen3-8b-dflash"}
    given = settings(**{name: str(models() / folder) for name, folder in pair.items()})
    (models() / "qwen3-8b" / "tokenizer.json").unlink()
    with caplog.at_level("INFO"):
        resolution._is_left(SimpleNamespace(), Launch.of(given, CPU), {"tokenizer": RULES["tokenizer"]})  # type: ignore[arg-type]
    assert re.fullmatch(
        r"DFLASH: tokenizer: the target has no tokenizer\.json\..* Fix: check --tokenizer-path\.", caplog.messages[0]
    )


def test_no_message_names_a_flag_that_sglang_rejects() -> None:
    known = {*sglang_parser()._option_string_actions, *OURS, *EVERYWHERE, *DOCKERS, *RENAMED}
    for path in Path(sglang_dflash.__path__[0]).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]", node.value):
                    assert flag in known, f"{flag} in {path.name}, line {node.lineno}"
