"""``results.jsonl``: appended line by line while a benchmark runs, read back to resume it and to report it.

Four kinds of lines, told apart by ``kind``:

* ``provenance``: one per invocation that added to the file; runs point to it by their ``session``.
* ``server``: one per server started, with the command, the environment and what ``/server_info`` says of it.
* ``request``: one per answered turn.
* ``run``: one per finished run, after its requests. Requests without it belong to a run that was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sglang_dflash.bench.files import append_lines
from sglang_dflash.bench.records import RequestRecord, RunKey, RunRecord
from sglang_dflash.errors import DFlashError

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
