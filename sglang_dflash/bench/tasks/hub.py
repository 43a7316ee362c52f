"""Rows of a public dataset, from a local file or from the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """Where a dataset lives on the hub.

    Attributes:
        path, name, split: arguments of ``datasets.load_dataset``.
        files: JSON-lines files of that repository, for datasets whose loading script is no longer run.
    """

    path: str
    split: str
    name: str | None = None
    files: Sequence[str] = ()


def load_rows(task: str, source: Source, data_dir: Path | None) -> list[Row]:
    """All rows, in the dataset's order.

    Args:
        data_dir: a folder with ``<task>.jsonl``, one row per line, columns named as on the hub.

    Raises:
        DFlashError: no such file, or the hub cannot be reached and its cache does not have the dataset.
    """
    if data_dir is not None:
        return _read_lines(data_dir / f"{task}.jsonl", source)
    from datasets import load_dataset

    try:
        if source.files:
            base = f"https://huggingface.co/datasets/{source.path}/resolve/main/"
            urls = [base + file for file in source.files]
            return list(load_dataset("json", data_files={source.split: urls}, split=source.split))
        return list(load_dataset(source.path, source.name, split=source.split))
    except OSError as error:  # every failure to reach the hub is one: no name, no route, no such file, offline mode
        raise DFlashError(
            f"dataset {source.path} of task {task!r} cannot be loaded ({error})",
            expected="a reachable Hugging Face hub, its cache, or a local copy",
            remedy=f"put the rows into DIR/{task}.jsonl and give --data-dir DIR, "
            "or use the tiny pairs' tasks, which need no network",
        ) from error


def _read_lines(path: Path, source: Source) -> list[Row]:
    if not path.exists():
        raise DFlashError(
            f"{path} does not exist",
            expected=f"the rows of {source.path} (split {source.split}), one JSON object per line",
            remedy="export it there, or leave out --data-dir to read from the hub",
        )
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
