"""Tasks that repeat themselves: what repeats, how far back, and that the two sets share nothing."""

from __future__ import annotations

from itertools import chain

import pytest
import transformers

from sglang_dflash_lab.bench import tasks
from sglang_dflash_lab.bench.tasks.repeats import TUNING
from sglang_dflash_lab.pairs import target_path

EDITS = ("edit-json", "edit-code", "edit-chat")


def asked(task: str) -> list[list[str]]:
    return [[message["content"] for message in question.messages] for question in tasks.load(task, 24)]


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
