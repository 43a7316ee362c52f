"""A server that exists only as a formula: its step log under any widths, and how long it took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from sglang_dflash.bench.step_log import Decode, Prefill, Step

WIDTHS = (1, 2, 4, 8, 16)
PREFILL_MS = 5.0
PROMPT = 40
Hazards = Callable[[int, int], float]


def step_ms(batch_size: int, width: int) -> float:
    """A step of 16 tokens costs between 1.4 and 4 plain ones."""
    return 8 + 0.4 * batch_size + (0 if width == 1 else 2) + 0.12 * batch_size * width


def serve(
    hazards: Hazards, lengths: Sequence[int], users: int, width: Callable[[], int], seed: int
) -> tuple[list[Step], float]:
    """Serve answers of these many decode tokens; ``hazards(answer, distance)`` is the chance of a draft.

    -> the log, and tokens per second, the prefills' tokens included.
    """
    random = Random(seed)
    steps: list[Step] = []
    todo, running, now = list(enumerate(lengths)), {}, 0.0
    while todo or running:
        joining = [todo.pop(0) for _ in range(min(len(todo), users - len(running)))]
        if joining:
            running.update(joining)
            steps.append(Prefill(now / 1000, tuple(str(number) for number, _ in joining), PROMPT, PREFILL_MS))
            now += PREFILL_MS
        chosen, accept = width(), []
        for number in running:
            accepted = 1
            while accepted < chosen and random.random() < hazards(number, accepted):
                accepted += 1
            accept.append(accepted)
        ms = step_ms(len(running), chosen) * random.uniform(0.9, 1.1)
        rids = tuple(str(number) for number in running)
        verify = (chosen,) * len(rids)
        steps.append(Decode(now / 1000, rids, chosen, verify, tuple(accept), PROMPT * len(rids), ms))
        now += ms
        running = {n: left - a for (n, left), a in zip(running.items(), accept, strict=True) if left > a}
    return steps, 1000 * sum(1 + tokens for tokens in lengths) / now


def recording(hazards: Hazards, lengths: Sequence[int], users: int, seed: int = 0) -> list[Step]:
    draw = Random(seed)
    return serve(hazards, lengths, users, lambda: draw.choice(WIDTHS), seed)[0]
