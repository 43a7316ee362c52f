"""Prompts of a file: conversations, and rows of the cards' data sets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.tasks import FIELDS, load

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def read(folder: Path, *rows: Any) -> list[Any]:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return [list(asked) for asked in load(str(path), len(rows))]


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        ({"turns": ["first", "second"]}, "first"),  # z-lab's loader
        ({"prompt": ["first", "second"], "reference": [], "prompt_id": 1}, "first"),  # MT-Bench
        ({"question": "2 + 2?", "answer": "#### 4"}, "2 + 2?"),  # GSM8K
        ({"problem": "2 + 2?", "solution": "4", "answer": "4"}, "2 + 2?"),  # MATH-500
        ({"task_id": "HumanEval/0", "prompt": "def f():", "test": ""}, "def f():"),
        ({"instruction": "Sort.", "input": "b, a", "output": "a, b"}, "Sort.\n\nb, a"),  # Alpaca
        ({"instruction": "Sort.", "input": "", "output": ""}, "Sort."),
    ],
)
def test_rows_of_the_cards_data_sets(row: dict[str, Any], asked: str, tmp_path: Path) -> None:
    assert read(tmp_path, row, {"messages": TALK}) == [[{"role": "user", "content": asked}], TALK]


@pytest.mark.parametrize(
    ("row", "found"),
    [({"text": "Hi", "id": 1}, "text, id"), ([], "list"), ({"turns": []}, "turns"), ({"messages": "Hi"}, "messages")],
)
def test_a_row_without_a_prompt_is_an_error_that_names_the_fields(row: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(DFlashError, match=rf"row 2 of .*rows.jsonl has no prompt: {found}") as caught:
        read(tmp_path, {"messages": TALK}, row)
    assert FIELDS in str(caught.value)
