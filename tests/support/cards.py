"""The published cards' commands, as argument lists, with the models' places exchanged."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "fixtures" / "cards"
NAMES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())
_RENAMED = "unrecognized arguments: --mamba-scheduler-strategy extra_buffer"
# What SGLang 0.5.23 says to each command where this package is not installed; it ends with status 2.
PLAIN_SGLANG_SAYS = dict.fromkeys(NAMES, _RENAMED) | {"Qwen3.5-4B": "tc_piecewise was removed"}


@dataclass(frozen=True)
class Card:
    """One published pair: what its card exports and what it runs."""

    name: str
    environment: dict[str, str]
    arguments: list[str]

    def arguments_for(self, target: Path | str, drafter: Path | str) -> list[str]:
        """The card's arguments with local models in place of the two hub ids."""
        places = {"--model-path": str(target), "--speculative-draft-model-path": str(drafter)}
        arguments = list(self.arguments)
        for flag, place in places.items():
            arguments[arguments.index(flag) + 1] = place
        return arguments

    def keywords_for(self, target: Path, drafter: Path) -> dict[str, Any]:
        """The same as keywords of ``sglang.Engine``."""
        arguments = self.arguments_for(target, drafter)
        following = zip_longest(arguments, arguments[1:], fillvalue="--")
        given = {word[2:].replace("-", "_"): value for word, value in following if word.startswith("--")}
        return {name: True if value.startswith("--") else _number_or_text(value) for name, value in given.items()}


def _number_or_text(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def card(name: str) -> Card:
    """Read ``command.txt``: ``export`` lines, then one ``python -m sglang.launch_server``."""
    text = (FOLDER / name / "command.txt").read_text().replace("\\\n", " ")
    environment: dict[str, str] = {}
    arguments: list[str] = []
    for line in filter(None, text.splitlines()):
        words = shlex.split(line)
        if words[0] == "export":
            variable, _, value = words[1].partition("=")
            environment[variable] = value
        else:
            assert words[:3] == ["python", "-m", "sglang.launch_server"]
            arguments = words[3:]
    return Card(name, environment, arguments)
