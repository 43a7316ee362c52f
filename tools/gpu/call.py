"""The jobs of one call: each in its slice of the memory, timed ones alone, rows as they are measured."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu import rows
from tools.gpu.site import CUDA

CONTEXT = 0.75  # GiB of a process outside torch's memory
WAITING, BUSY, READY, DONE = "waiting", "busy", "ready", "done"


@dataclass(eq=False)
class Job:
    """What runs in one thread.

    Attributes:
        gib: of the device's memory, while it runs.
        body: called with the job, in its thread; what it returns is a row.
        what: kind of that row, and of the one if it fails.
        alone: start it when all earlier jobs have ended.
    """

    name: str
    gib: float
    body: Callable[[Job], dict[str, Any] | None]
    what: str
    key: dict[str, Any] = field(default_factory=dict)
    alone: bool = False
    state: str = WAITING
    call: Call = field(init=False)

    def run(self) -> None:
        self.measure(self.what, lambda: self.body(self))
        self.call.change(self, DONE)

    def measure(self, what: str, measured: Callable[[], dict[str, Any] | None], **key: Any) -> None:
        """Write what is measured as a row, if it is not None, or the error."""
        try:
            found = measured()
        except Exception as error:  # noqa: BLE001 - a server that ends or a wrong answer is a result
            found = {"error": describe(error)}
        if found is not None:
            self.row(what, **key, **found)

    def row(self, what: str, **measured: Any) -> None:
        self.call.write(what, job=self.name, **{**self.key, **measured})

    def wait_for_turn(self) -> None:
        """Return when this job runs alone: all others have ended, or wait too."""
        self.call.change(self, READY)
        with self.call.changed:
            self.call.changed.wait_for(lambda: self.state == BUSY)

    @property
    def folder(self) -> Path:
        """Where its servers' logs are."""
        path = self.call.out / self.name.replace(" ", "-")
        path.mkdir(parents=True, exist_ok=True)
        return path

    @property
    def slice(self) -> dict[str, str]:
        """Environment of a server that sees this job's memory only."""
        return {"GPU_KIT_GIB": str(self.gib - CONTEXT)} if self.call.real else {}


class Call:
    """Runs jobs until all are done or the time is over.

    A job starts as soon as its slice is free, the first of the list first, if fewer than ``most`` are busy. A job that
    waits for its turn goes on when no other is busy and none can start.
    """

    def __init__(
        self, device: str, out: Path, gib: float, seconds: float, began: float | None = None, most: int = 99
    ) -> None:
        self.most = most
        self.device, self.real, self.out, self._gib, self._seconds = device, device == CUDA, out, gib, seconds
        self._began, self.changed, self._jobs = began or time.time(), threading.Condition(), list[Job]()

    @property
    def passed(self) -> float:
        return time.time() - self._began

    def write(self, what: str, **row: Any) -> None:
        row = {"what": what, **row, "t": round(self.passed, 1)}
        rows.append(self.out, **row)
        print(str(row)[:700], flush=True)

    def change(self, job: Job, state: str) -> None:
        with self.changed:
            job.state = state
            print(f"[{self.passed:6.1f}] {job.name}: {state}", flush=True)
            self.changed.notify_all()

    def run(self, jobs: Sequence[Job]) -> None:
        """Run the jobs. Those that the clock ends get a row with the end of their log; they are not stopped."""
        self._jobs = list(jobs)
        for job in jobs:
            job.call = self
        with self.changed:
            while self.passed < self._seconds and any(job.state != DONE for job in jobs):
                self._start()
                self.changed.wait(0.5)
        late = [job for job in jobs if job.state != DONE]
        for job in late:
            job.row(job.what, error=f"{_end_of_log(job.folder)}\nended by the clock while {job.state}")
        errors = sum("error" in row for row in rows.read(self.out))
        self.write("end", seconds=round(self.passed, 1), errors=errors, cut_off=[job.name for job in late])

    def _start(self) -> None:
        for number, job in enumerate(self._jobs):
            held = sum(each.gib for each in self._jobs if each.state in (BUSY, READY))
            earlier = all(each.state == DONE for each in self._jobs[:number])
            has_place = sum(each.state == BUSY for each in self._jobs) < self.most
            if job.state == WAITING and (earlier or not job.alone and has_place and held + job.gib <= self._gib):
                self.change(job, BUSY)
                threading.Thread(target=job.run, daemon=True).start()
        ready = [job for job in self._jobs if job.state == READY]
        if ready and not any(job.state == BUSY for job in self._jobs):
            self.change(ready[0], BUSY)


def describe(error: BaseException) -> str:
    """Return the end of the server's log, then the line that raised the error, and the error."""
    notes, place = "\n".join(getattr(error, "__notes__", ())), traceback.extract_tb(error.__traceback__)[-1]
    return f"{notes}\n{place.filename}:{place.lineno}: {type(error).__name__}: {error}"[-4000:].strip()


def _end_of_log(folder: Path) -> str:
    logs = sorted(folder.glob("*.log"), key=lambda log: log.stat().st_mtime)
    return logs[-1].read_text(errors="replace")[-3000:] if logs else ""
