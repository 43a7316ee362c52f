"""Training only: sums without a story.

An answer of the math task holds two or three sums among fifty other tokens. Here nearly every token of the answer
needs arithmetic, so the model practises carrying and borrowing far more often.
"""

from __future__ import annotations

from random import Random

from sglang_dflash.pairs.corpus.conversation import Example
from sglang_dflash.pairs.corpus.math_task import LARGEST


def draw(rng: Random) -> Example:
    sums = [_sum(rng) for _ in range(rng.randint(6, 12))]
    asked = ", ".join(left for left, _ in sums)
    answer = "\n".join(f"{left} = {result}" for left, result in sums)
    return Example("sums", asked, f"Work out: {asked}", f"I work out {len(sums)} sums.", answer, answer)


def _sum(rng: Random) -> tuple[str, int]:
    """The expression and its result, both within the range of the math task."""
    kind = rng.choice("++--*")
    if kind == "*":
        a, b = rng.randint(2, 6), rng.randint(2, 9)
        return f"{a} * {b}", a * b
    if kind == "+":
        a = rng.randint(2, LARGEST - 2)
        b = rng.randint(2, LARGEST - a)
        return f"{a} + {b}", a + b
    a = rng.randint(4, LARGEST)
    b = rng.randint(2, a - 2)
    return f"{a} - {b}", a - b
