"""Prompts: the same for the same seed, what a repeating task repeats, and files."""

from __future__ import annotations

import json
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest
import transformers

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import tasks
from sglang_dflash_lab.bench.tasks import TUNING
from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.real.demo import PROMPTS, SHOWN

EDITS = ("edit-json", "edit-code", "edit-chat")


def asked(task: str) -> list[list[str]]:
    return [[message["content"] for message in messages] for messages in tasks.load(task, 24)]


@pytest.mark.parametrize("task", [*EDITS, "repeat", "quote"])
def test_prompts_are_their_seeds_and_no_question_is_in_both_sets(task: str) -> None:
    assert tasks.load(task, 8) == tasks.load(task, 24)[:8] != tasks.load(task, 8, seed=1)
    table, tuning = (set(chain.from_iterable(asked(name))) for name in (task, task + TUNING))
    assert not {text for text in table if text.endswith((".", "?", '"""\n'))} & tuning


@pytest.mark.parametrize("task", EDITS)
def test_an_edit_changes_one_word_or_number_of_the_question(task: str) -> None:
    for before, _, after in asked(task):
        olds, news = before.replace("`", " ").split(), after.replace("`", " ").split()
        changed = {(old, new) for old, new in zip(olds, news, strict=True) if old != new}
        assert 1 <= len(changed) <= 4


def test_a_repeat_asks_the_same_again_and_a_quote_from_2000_to_7000_tokens_back() -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(target_path("tiny-hybrid"))
    for question, answer, again in asked("repeat"):
        assert question == again != answer
    lengths = []
    for question, _, *others, again in asked("quote"):
        assert question == again and question not in others
        lengths.append(len(tokenizer("".join(others))["input_ids"]))
    assert min(lengths) >= 1500 and max(lengths) <= 7200
    assert max(lengths) > 2 * min(lengths)


def test_a_file_of_conversations_is_a_task(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"{i}?"}]} for i in range(20)]
    file = tmp_path / "mine.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, again, other = (tasks.load(str(file), 8, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert len({messages[0]["content"] for messages in first}) == 8
    assert len(tasks.load(str(file), 100)) == 20
    assert len(tasks.load("wild", 1000)) == 83
    assert len(tasks.load("questions", 7)) == 7


@pytest.mark.parametrize("text", [None, "{", '{"prompt": "x"}'])
def test_what_is_no_task_is_refused_with_the_known_ones(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(DFlashError, match="one of math, code"):
        tasks.load(str(file), 1)


def test_prompts_of_the_published_model() -> None:
    assert Counter(kind for kind, _ in PROMPTS) == {"text": 10, "code": 10, "chat": 10}
    assert len({message["content"] for _, [message] in PROMPTS}) == 30
    assert [PROMPTS[number][0] for number in SHOWN] == ["text", "code", "code", "chat"]
