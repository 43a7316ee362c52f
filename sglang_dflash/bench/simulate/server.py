"""A closed loop of users on one simulated server, step by step, under a width policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from sglang_dflash.bench.simulate.costs import StepCosts
from sglang_dflash.bench.simulate.reach import accepted_from
from sglang_dflash.width import WidthPolicy

_Observed = tuple[int, int, int, list[int], float]


@dataclass
class Replayed:
    """An answer on the simulated server: its difficulties, and how far it has come."""

    prompt: float
    tokens: int
    difficulties: list[float]
    done: int = 0

    @property
    def context(self) -> int:
        return round(self.prompt) + 1 + self.done


@dataclass
class Outcome:
    """What a run came to. ``tokens`` counts whole answers, the prefills' tokens included."""

    seconds: float = 0.0
    tokens: int = 0
    steps: int = 0
    widths: int = 0
    blocks: int = 0
    committed: int = 0

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def mean_width(self) -> float:
        return self.widths / self.steps

    @property
    def accept_length(self) -> float:
        """Accepted drafts + bonus per block, as the worker counts them, what stands behind an answer's end included."""
        return self.committed / self.blocks


@dataclass(frozen=True)
class Server:
    """The recorded server, as far as the simulation knows it.

    Attributes:
        acceptance: see :mod:`sglang_dflash.bench.simulate.reach`.
        in_vain: steps launched for an answer behind its end; 1 under overlap scheduling.
        outside_ms: from an answer's last step to its user's next request in the queue.
    """

    costs: StepCosts
    acceptance: list[float]
    in_vain: int
    outside_ms: float

    def serve(self, answers: Sequence[Replayed], users: int, policy: WidthPolicy, random: Random) -> Outcome:
        """``users`` who each ask for the next answer as soon as they have their last one."""
        outcome = Outcome(tokens=sum(1 + answer.tokens for answer in answers))
        waiting = deque(answers)
        # When, and not before how many steps: what was launched before an answer's end was known goes first
        arrivals = deque([(0.0, 0)] * min(users, len(waiting)))
        running: list[Replayed] = []
        leaving: list[list[Replayed]] = [[] for _ in range(self.in_vain)]
        seen: _Observed | None = None
        now, ended = 0.0, 0.0
        while waiting or running:
            vain = [answer for step in leaving for answer in step]
            if not running and not vain:
                now = max(now, arrivals[0][0])
            joined = []
            while arrivals and arrivals[0][0] <= now and arrivals[0][1] <= outcome.steps:
                arrivals.popleft()
                if waiting:
                    joined.append(waiting.popleft())
            if joined:
                now += self.costs.prefill_ms(sum(answer.prompt for answer in joined))
                running += joined
            batch = running + vain
            if not batch:
                continue
            context = sum(answer.context for answer in batch)
            width = policy.width(len(batch), context)
            # The step before is read only once this one is launched
            if seen is not None:
                _tell(policy, seen)
            accept = [accepted_from(a.difficulties, min(a.done, a.tokens), width, self.acceptance) for a in batch]
            ms = self.costs.step_ms(len(batch), width, context) * random.choice(self.costs.noise)
            seen = len(batch), width, context, accept, ms
            now += ms
            outcome.steps += 1
            outcome.widths += width
            outcome.blocks += len(running)
            outcome.committed += sum(accept[: len(running)])
            for answer, committed in zip(running, accept, strict=False):
                answer.done = min(answer.done + committed, answer.tokens)
            gone = [answer for answer in running if answer.done == answer.tokens]
            running = [answer for answer in running if answer.done < answer.tokens]
            leaving = [*leaving[1:], gone] if leaving else []
            arrivals.extend((now + self.outside_ms, outcome.steps + self.in_vain) for _ in gone)
            ended = now if gone else ended
        outcome.seconds = ended / 1000
        return outcome


def _tell(policy: WidthPolicy, seen: _Observed) -> None:
    batch_size, width, context, accept, ms = seen
    policy.observe(width, accept)
    policy.observe_time(batch_size, width, context, ms)
