"""The questions that a diagnosis asks: three of each task, and notes that make a prompt long."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from sglang_dflash.diagnose.client import Message

_PROMPTS = {
    "math": (
        "There are 10 cards in Quinn's bag. Quinn loses 5 of them. Then Quinn finds 22 cards at home. "
        "How many cards does Quinn have now?",
        "Ben starts the day with 52 shells. Ben sells half of the shells. Then Ben finds 39 shells at home. "
        "How many shells does Ben have now?",
        "There are 13 shells in Ben's bag. Ben gives 7 shells to Rosa. Ben buys 38 more. "
        "How many shells does Ben have now?",
    ),
    "code": (
        "Write a Python function `count_positive` that returns the number of the positive numbers. Use a loop.",
        "Write a Python function `sum_odd` that returns the sum of the odd numbers. Use a loop.",
        "Write a Python function `count_even` that returns the number of the even numbers. Use a loop.",
    ),
    "json": (
        "Dan ordered 17 white pens to be sent to Athens. "
        "Write a JSON record with the keys color, city, item, quantity.",
        "Noah ordered 68 red shells to be sent to Paris before Friday. "
        "Write a JSON record with the keys color, city, item, name, day, quantity.",
        "Cleo ordered 69 red shells before Saturday for 29 dollars to be sent to Athens. "
        "Write a JSON record with the keys city, quantity, color, name, item, price.",
    ),
    "chat": (
        "What should Grace see in Cairo in February?",
        "Tell Cleo about Dublin in December.",
        "I am going to Tokyo in March with Ava. Any advice?",
    ),
}
TASKS = tuple(_PROMPTS)
_NAMES = ("Ava", "Ben", "Cleo", "Dan", "Grace", "Kira", "Noah", "Quinn", "Rosa", "Zoe")
_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_COLORS = ("black", "blue", "green", "red", "white", "yellow")
_THINGS = ("bell", "book", "coin", "kite", "map", "shell")


@dataclass(frozen=True)
class Question:
    """One prompt.

    Attributes:
        id: begins with the task.
        messages: OpenAI chat messages, the last one the user's.
    """

    id: str
    messages: tuple[Message, ...]


def all_questions() -> tuple[Question, ...]:
    """All questions, the tasks in turn."""
    return tuple(
        Question(f"{task}/{number}", ({"role": "user", "content": prompt},))
        for number, prompts in enumerate(zip(*_PROMPTS.values(), strict=True))
        for task, prompt in zip(TASKS, prompts, strict=True)
    )


def notes(characters: int) -> str:
    """Unrelated notes of at most this many characters, the same at every call."""
    rng, text = Random(0), "Notes:"
    while len(text) < characters:
        day, name, color, thing = map(rng.choice, (_DAYS, _NAMES, _COLORS, _THINGS))
        text += f" On {day}, {name} painted a {color} {thing}."
    return text[:characters].rpartition(" ")[0]
