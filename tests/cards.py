"""The published cards' commands, as argument lists, with the models' places exchanged."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent / "fixtures" / "cards"
NAMES = sorted(folder.name for folder in FOLDER.iterdir() if folder.is_dir())


@dataclass(frozen=True)
class Card:
    """One published pair: what its card exports and what it runs."""

    name: str
    environment: dict[str, str]
    arguments: list[str]

    def arguments_for(self, target: Path, drafter: Path) -> list[str]:
        """The card's arguments with local models in place of the two hub ids."""
        places = {"--model-path": str(target), "--speculative-draft-model-path": str(drafter)}
        arguments = list(self.arguments)
        for flag, place in places.items():
            arguments[arguments.index(flag) + 1] = place
        return arguments


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
