"""Prompts: the same for the same seed, what a repeating task repeats, and files."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import tasks
from sglang_dflash_lab.bench.tasks import TUNING

EDITS = ("edit-json", "edit-code", "edit-chat")


def asked(task: str) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in tasks.load(task, 24)]


@pytest.mark.parametrize("task", [*EDITS, "repeat", "quote"])
def test_prompts_are_their_seeds_and_no_question_is_in_both_sets(task: str) -> None:
    assert tasks.load(task, 8) == tasks.load(task, 24)[:8] != tasks.load(task, 8, seed=1)
    table, tuning = (set(chain.from_iterable(asked(name))) for name in (task, task + TUNING))
    assert not {text for text in table if text.endswith((".", "?", '"""\n'))} & tuning


@pytest.mark.parametrize("text", [None, "{", '{"prompt": "x"}'])
def test_what_is_no_task_is_refused_with_the_known_ones(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DFlashError, match="one of math, code"):
        tasks.load(str(file), 1)
