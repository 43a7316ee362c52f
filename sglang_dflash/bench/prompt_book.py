"""The prompts as token ids, fixed once and sent to every arm, so that they are byte-identical by construction."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sglang_dflash.bench.client import Client
from sglang_dflash.bench.results import append_lines
from sglang_dflash.bench.tasks.question import Message, Question

FILE_NAME = "prompts.jsonl"


class PromptBook:
    """Token ids by (task, question, turn), kept in a file beside the results so that a resumed session uses the same.

    A later turn contains the answers before it. The first arm that gets there settles them for all arms: otherwise two
    arms whose answers part at a near-tie would be asked different questions from then on.
    """

    def __init__(self, folder: Path, thinking: bool | None) -> None:
        self._thinking = thinking
        self._path = folder / FILE_NAME
        self._ids: dict[tuple[str, str, int], list[int]] = {}
        if self._path.exists():
            for line in self._path.read_text().splitlines():
                row = json.loads(line)
                self._ids[row["task"], row["question"], row["turn"]] = row["input_ids"]

    async def input_ids(self, client: Client, task: str, question: Question, answers: list[str]) -> list[int]:
        """The prompt of the turn after ``answers``, rendered by the server's chat template the first time."""
        key = task, question.id, len(answers)
        if key not in self._ids:
            self._ids[key] = await client.tokenize(conversation(question, answers), self._thinking)
            row = {"task": task, "question": question.id, "turn": len(answers), "input_ids": self._ids[key]}
            append_lines(self._path, [row])
        return self._ids[key]


def conversation(question: Question, answers: list[str]) -> list[Message]:
    """The opening messages, then each answer with the follow-up that comes after it."""
    messages = list(question.messages)
    for answer, follow_up in zip(answers, question.follow_ups, strict=False):
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": follow_up}]
    return messages


def digest(input_ids: list[int]) -> str:
    return hashlib.sha256(json.dumps(input_ids).encode()).hexdigest()[:16]
