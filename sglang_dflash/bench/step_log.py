"""The steps as our worker logs them: ``SGLANG_DFLASH_STEP_LOG`` names a file, each step is a line of JSON in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from sglang_dflash.bench.files import file_name
from sglang_dflash.errors import DFlashError

VARIABLE = "SGLANG_DFLASH_STEP_LOG"
FOLDER = "steps"


@dataclass(frozen=True)
class Prefill:
    """A prefill of one or more requests.

    Attributes:
        at: seconds since the server's start.
        rids: the requests' ids.
        tokens: computed, so without those of the prefix cache, of all requests together.
        ms: how long it took; None where that was not measured.
    """

    at: float
    rids: tuple[str, ...]
    tokens: int
    ms: float | None


@dataclass(frozen=True)
class Decode:
    """A decode step.

    Attributes:
        at: seconds since the server's start.
        rids: the requests' ids, in the order of ``accept`` and ``verify``.
        width: of the block, anchor included; 1 is plain decoding.
        verify: verified positions of each request, anchor included; as many as ``width`` unless the block was cut.
        accept: accepted drafts + bonus of each request.
        context: committed tokens of the batch.
        ms: from the start of this step to the start of the next; None where that was not measured.
    """

    at: float
    rids: tuple[str, ...]
    width: int
    verify: tuple[int, ...]
    accept: tuple[int, ...]
    context: int
    ms: float | None


Step = Prefill | Decode


def variable(out: Path, label: str) -> tuple[tuple[str, str], ...]:
    """The environment variable for the next server of an arm: a file of its own for every start."""
    folder = _folder(out, label)
    folder.mkdir(parents=True, exist_ok=True)
    paths = (folder / f"{number}.jsonl" for number in count())
    return ((VARIABLE, str(next(path for path in paths if not path.exists()).absolute())),)


def logs(out: Path, label: str) -> list[Path]:
    """An arm's logs in the results folder ``out``, in the order of its servers' starts; empty if it has none."""
    return sorted(_folder(out, label).glob("*.jsonl"), key=lambda path: int(path.stem))


def _folder(out: Path, label: str) -> Path:
    return out / FOLDER / file_name(label)


def read(path: Path) -> list[Step]:
    """The steps of a log, in the order of their launch.

    A last line cut short by a kill is dropped.

    Raises:
        DFlashError: no such file, or a line that is no step.
    """
    if not path.is_file():
        raise DFlashError(f"no step log {path}", expected="a file", remedy=f"serve with {VARIABLE}={path}")
    *lines, _torn = path.read_text().split("\n")
    return list(_parse(lines, path))


def _parse(lines: Iterable[str], path: Path) -> Iterator[Step]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            yield _decode(row) if row["kind"] == "decode" else _prefill(row)
        except (ValueError, KeyError, TypeError) as error:
            raise DFlashError(
                f"line {number} of {path} is no step ({error!r})",
                expected="a log that our worker wrote",
                remedy=f"remove that line, or record again with {VARIABLE}",
            ) from error


def _prefill(row: dict[str, Any]) -> Prefill:
    return Prefill(row["at"], tuple(row["rids"]), row["tokens"], row["ms"])


def _decode(row: dict[str, Any]) -> Decode:
    accept = tuple(row["accept"])
    verify = tuple(row["verify"] or [row["width"]] * len(accept))
    if not len(accept) == len(verify) == len(row["rids"]):
        raise ValueError("rids, verify and accept are not equally long")
    return Decode(row["at"], tuple(row["rids"]), row["width"], verify, accept, row["context"], row["ms"])
