"""Launch commands of DFLASH users (``tests/fixtures/commands``)."""

from __future__ import annotations

import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml

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
