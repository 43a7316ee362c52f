"""The task ``wild``: prompts by hand, of all kinds, far from what the tiny pairs were trained on.

A drafter guesses worst where its target was never taught; a benchmark of the pairs' own tasks alone does not show that.
Nobody grades the answers: a tiny target writes nonsense here, and its drafter has to follow.
"""

from __future__ import annotations

from pathlib import Path

from sglang_dflash.bench.tasks.question import Question, ask

WILD = "wild"
_MARK = "%% "  # begins the line before a prompt, which gives its kind and name
_FILE = Path(__file__).with_name("wild.txt")


def questions() -> list[Question]:
    """All of them, in the order of ``wild.txt``; a question's id begins with its kind."""
    blocks = f"\n{_FILE.read_text(encoding='utf-8')}".split(f"\n{_MARK}")[1:]
    return [ask(name, prompt.strip("\n")) for name, _, prompt in (block.partition("\n") for block in blocks)]
