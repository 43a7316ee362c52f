"""A whole benchmark: every run of the plan that the results file does not have yet."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench import provenance, results
from sglang_dflash_lab.bench.metrics import output_throughput
from sglang_dflash_lab.bench.results import RequestRecord, RunKey
from sglang_dflash_lab.bench.runner import measure
from sglang_dflash_lab.bench.servers import Servers
from sglang_dflash_lab.bench.settings import Settings
from sglang_dflash_lab.bench.tasks.question import Question


class Session:
    """Runs ``settings`` and appends to ``settings.out/results.jsonl``.

    Interrupt it at any time: finished runs are on the disk, the interrupted one is made again by the next session with
    the same ``--out``.
    """

    def __init__(self, settings: Settings, console: Console) -> None:
        self._settings, self._console = settings, console
        before = results.read(settings.out)
        _refuse_other_settings(settings, before)
        self._number = len(before.provenance)
        self._todo = [key for key in self._plan() if key not in before.finished]
        self._questions = {name: settings.questions(name) for name in settings.tasks}
        self._grades: dict[tuple[str, str, str], bool] = {}

    def run(self) -> None:
        """Measure what is missing.

        Raises:
            KeyboardInterrupt: after the servers were stopped.
        """
        asyncio.run(self.measure())

    async def measure(self) -> None:
        """:meth:`run`, for a caller that is in an event loop already."""
        if not self._todo:
            return
        out = self._settings.out
        results.append(out, "provenance", [provenance.collect(self._settings.describe())])
        async with Servers(self._settings, self._console.print) as servers:
            with _progress(self._console) as progress:
                runs = progress.add_task("runs", total=len(self._todo))
                for key in self._todo:
                    client = await servers.client(key.mode)
                    questions = self._questions[key.task]
                    answers = progress.add_task(_name(key), total=sum(1 + len(q.follow_ups) for q in questions))
                    on_answer = partial(progress.advance, answers)
                    run, requests = await measure(
                        client, key, questions, servers.book, self._settings.sampling, self._number, on_answer
                    )
                    results.append_run(out, run, self._graded(requests))
                    progress.remove_task(answers)
                    progress.advance(runs)
                    speed = output_throughput(requests, run.wall_s)
                    self._console.print(f"{_name(key)}: {speed:.1f} tok/s, {run.wall_s:.1f} s")

    def _plan(self) -> Iterator[RunKey]:
        s = self._settings
        order = interleaved if s.together or s.base_urls else one_server_at_a_time
        return order([mode.label for mode in s.modes], s.tasks, s.concurrencies, s.repeats)

    def _graded(self, requests: list[RequestRecord]) -> list[RequestRecord]:
        questions = {(name, q.id): q for name, members in self._questions.items() for q in members}
        return [replace(r, correct=self._correct(questions[r.run.task, r.question], r)) for r in requests]

    def _correct(self, question: Question, request: RequestRecord) -> bool | None:
        """The last turn's grade; equal answers of other arms and repeats are graded once."""
        if question.grader is None or request.turn < len(question.follow_ups):
            return None
        key = request.run.task, question.id, request.text
        if key not in self._grades:
            self._grades[key] = question.grader(request.text)
        return self._grades[key]


def _refuse_other_settings(settings: Settings, before: results.Results) -> None:
    """Runs of other settings do not belong into the same file; more modes, tasks or repeats do."""
    new = settings.describe()
    for row in before.provenance[-1:]:
        old = row["settings"]
        for name in ("target", "drafter", "num_prompts", "sampling", "seed"):
            if old[name] != new[name]:
                raise DFlashError(
                    f"{settings.out} was measured with {name} {old[name]}, not {new[name]}",
                    expected="the same settings when a benchmark is resumed",
                    remedy="give another --out",
                )


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(), console=console, transient=True, refresh_per_second=2,
    )  # fmt: skip


def _name(key: RunKey) -> str:
    return f"{key.mode}  {key.task}  c={key.concurrency}  repeat {key.repeat + 1}"


def interleaved(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """Arms of a cell directly after each other: for servers that are all up at the same time.

    The order of the arms is turned around in every second repeat (A B, B A, …), so a linear drift cancels.
    """
    for repeat in range(repeats):
        for concurrency, task, mode in product(concurrencies, tasks, _turned(modes, repeat)):
            yield RunKey(mode, task, concurrency, repeat)


def one_server_at_a_time(
    modes: Sequence[str], tasks: Sequence[str], concurrencies: Sequence[int], repeats: int
) -> Iterator[RunKey]:
    """All cells of an arm, then the next arm: for servers that need the whole machine.

    The arm that ends a repeat begins the next one, so it is started once for both.
    """
    for repeat in range(repeats):
        for mode, concurrency, task in product(_turned(modes, repeat), concurrencies, tasks):
            yield RunKey(mode, task, concurrency, repeat)


def _turned(modes: Sequence[str], repeat: int) -> Sequence[str]:
    return modes[::-1] if repeat % 2 else modes
