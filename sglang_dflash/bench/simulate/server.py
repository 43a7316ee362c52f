"""A closed loop of users on one simulated server, step by step, under a width policy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from sglang_dflash.bench.simulate.costs import StepCosts
from sglang_dflash.bench.simulate.reach import accepted_from
from sglang_dflash.width import WidthPolicy


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
        """Tokens per verified block of an answer, as the benchmark's micro accept length: what a block has behind the
        end of its answer does not count."""
        return self.tokens / self.blocks


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
        loop = _ClosedLoop(self, answers, users, policy, random)
        while loop.waiting or loop.running:
            loop.admit()
            loop.step()
        return loop.outcome


class _ClosedLoop:
    """One run: what waits, what runs, and what the host does not know yet."""

    def __init__(
        self, server: Server, answers: Sequence[Replayed], users: int, policy: WidthPolicy, random: Random
    ) -> None:
        self._server, self._policy, self._random = server, policy, random
        self.outcome = Outcome(tokens=sum(1 + answer.tokens for answer in answers))
        self.waiting = deque(answers)
        self.running: list[Replayed] = []
        self._now = 0.0
        # When a user asks, and before which step at the earliest: steps in vain are launched first
        self._questions = deque([(0.0, 0)] * min(users, len(self.waiting)))
        self._ended: deque[list[Replayed]] = deque([[]] * server.in_vain, server.in_vain)
        self._unseen: Callable[[], None] | None = None

    def admit(self) -> None:
        """Prefill every question that was asked by now; with nothing else to do, wait for one."""
        if not self.running and not any(self._ended):
            self._now = max(self._now, self._questions[0][0])
        joined = []
        while self._questions and self._questions[0][0] <= self._now and self._questions[0][1] <= self.outcome.steps:
            self._questions.popleft()
            if self.waiting:
                joined.append(self.waiting.popleft())
        if joined:
            self._now += self._server.costs.prefill_ms(sum(answer.prompt for answer in joined))
            self.running += joined

    def step(self) -> None:
        """A decode step of the running answers, and of those whose end is not known yet."""
        server, outcome = self._server, self.outcome
        batch = [*self.running, *(answer for answers in self._ended for answer in answers)]
        context = sum(answer.context for answer in batch)
        width = self._policy.width(len(batch), context)
        if self._unseen is not None:  # the step before is read only once this one is launched
            self._unseen()
        accept = [accepted_from(answer.difficulties, answer.done, width, server.acceptance) for answer in batch]
        ms = server.costs.step_ms(len(batch), width, context) * self._random.choice(server.costs.noise)
        self._unseen = partial(self._tell, len(batch), width, context, accept, ms)
        self._now += ms
        outcome.steps += 1
        outcome.widths += width
        outcome.blocks += len(self.running)
        self._commit(accept)

    def _commit(self, accept: list[int]) -> None:
        for answer, committed in zip(self.running, accept, strict=False):
            answer.done = min(answer.done + committed, answer.tokens)
        ended = [answer for answer in self.running if answer.done == answer.tokens]
        self.running = [answer for answer in self.running if answer.done < answer.tokens]
        self._ended.append(ended)
        question = self._now + self._server.outside_ms, self.outcome.steps + self._server.in_vain
        self._questions.extend(question for _ in ended)
        if ended:
            self.outcome.seconds = self._now / 1000

    def _tell(self, batch_size: int, width: int, context: int, accept: list[int], ms: float) -> None:
        self._policy.observe(width, accept)
        self._policy.observe_time(batch_size, width, context, ms)
