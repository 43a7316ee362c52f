"""``results.jsonl``: what a benchmark writes line by line, and reads back to resume and to report.

Four kinds of lines, told apart by ``kind``:

* ``provenance``: one per invocation that added to the file; runs point to it by their ``session``.
* ``server``: one per server started, with the command, the environment and what ``/server_info`` says of it.
* ``request``: one per answered turn.
* ``run``: one per finished run, after its requests. Requests without it belong to a run that was interrupted.

All times are seconds of the client's monotonic clock.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.diagnose.answers import Record, RequestRecord, RunKey
from sglang_dflash.errors import DFlashError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def append_lines(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Append one JSON object per line. Whole lines are on the disk when this returns."""
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def write_csv(path: Path, kind: type[DataclassInstance], rows: Sequence[DataclassInstance]) -> None:
    """Write dataclasses of one kind, their fields as headings."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(kind.__dataclass_fields__))
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def file_name(label: str) -> str:
    """An arm's label as the stem of a file's name."""
    return re.sub(r"[^\w.-]", "_", label)


@dataclass(frozen=True)
class RunRecord(Record):
    """One measured run; its line is written after those of its requests, so it also says that they are complete.

    Attributes:
        wall_s: from the first request sent to the last token received.
        session: index of the provenance line this run was measured under.
        started_at: ISO time with zone.
        load_average: 1-minute load of the client's machine just before the run.
        server_accept_length: ``avg_spec_accept_length`` of ``/server_info`` after the run: the server's lifetime,
            warm-up included, so it is near but not equal to the run's own figure.
        worker: by how much the counters of our worker in ``/server_info`` grew during the run: ``steps_by_width``,
            ``blocks_by_accept_length`` and, if the server measures them, ``stage_seconds``. None for another worker.
    """

    wall_s: float
    session: int
    started_at: str
    load_average: float
    server_accept_length: float | None = None
    worker: dict[str, dict[str, float]] | None = None


FILE_NAME = "results.jsonl"


@dataclass
class Results:
    """The content of a results file; ``requests`` holds those of finished runs only."""

    provenance: list[dict[str, Any]] = field(default_factory=list)
    servers: list[dict[str, Any]] = field(default_factory=list)
    requests: list[RequestRecord] = field(default_factory=list)
    runs: list[RunRecord] = field(default_factory=list)

    @property
    def finished(self) -> set[RunKey]:
        return {run.run for run in self.runs}


def read(folder: Path) -> Results:
    """Read ``folder/results.jsonl``; an empty :class:`Results` if there is none.

    A last line cut short by a kill is dropped. A run that was started again after an interruption keeps only the
    requests of the attempt that finished.
    """
    results = Results()
    open_requests: dict[RunKey, list[RequestRecord]] = {}
    for row in _rows(folder / FILE_NAME):
        kind = row.pop("kind")
        if kind == "provenance":
            results.provenance.append(row)
            open_requests.clear()
        elif kind == "server":
            results.servers.append(row)
        elif kind == "request":
            request = RequestRecord.from_json(row)
            open_requests.setdefault(request.run, []).append(request)
        elif kind == "run":
            run = RunRecord.from_json(row)
            results.runs.append(run)
            results.requests.extend(open_requests.pop(run.run, []))
    return results


def read_finished(folder: Path) -> Results:
    """:func:`read`, for those who need at least one run.

    Raises:
        DFlashError: no results file in ``folder``, or none of its runs finished.
    """
    results = read(folder)
    if not results.runs:
        raise DFlashError(
            f"no finished run in {folder / FILE_NAME}",
            expected="a folder written by `sglang-dflash bench --out`",
            remedy="run the benchmark, or give its --out folder",
        )
    return results


def append(folder: Path, kind: str, rows: Iterable[dict[str, Any]]) -> None:
    """Add lines of one kind. A line that a kill cut short is dropped first."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    _drop_torn_tail(path)
    append_lines(path, ({"kind": kind, **row} for row in rows))


def append_run(folder: Path, run: RunRecord, requests: Iterable[RequestRecord]) -> None:
    """Add a finished run: its requests, then the line that says that they are complete."""
    append(folder, "request", map(asdict, requests))
    append(folder, "run", [asdict(run)])


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    lines = path.read_text().split("\n") if path.exists() else []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                return
            raise DFlashError(
                f"line {number} of {path} is not JSON ({error})",
                expected="the file as the benchmark wrote it",
                remedy="remove that line, or start again in an empty folder",
            ) from error


def _drop_torn_tail(path: Path) -> None:
    with path.open("ab+") as file:
        if file.tell() == 0:
            return
        file.seek(-1, 2)
        if file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
