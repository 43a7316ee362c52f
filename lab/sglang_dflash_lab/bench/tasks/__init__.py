"""The tasks by name: public datasets as the model cards ask them; offline, the tiny pairs' own and ``wild``."""

from __future__ import annotations

from pathlib import Path
from random import Random

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.tasks import offline, repeats
from sglang_dflash_lab.bench.tasks.datasets import DATASETS, questions
from sglang_dflash_lab.bench.tasks.question import Question

TASKS = (*offline.TASKS, *offline.MIXTURES, offline.WILD, *repeats.TASK_NAMES, *DATASETS)


def check_name(name: str) -> None:
    """Refuse an unknown task.

    Raises:
        DFlashError: there is none of that name.
    """
    if name not in TASKS:
        raise DFlashError(f"task {name!r}", expected=f"one of {', '.join(TASKS)}", remedy="choose one of these")


def load(name: str, count: int, *, seed: int = 0, data_dir: Path | None = None) -> list[Question]:
    """``count`` questions of a task, or all it has if that is fewer; the same for the same arguments.

    A question is never asked twice in a run: a repeated prompt would be answered from the prefix cache.

    Args:
        data_dir: folder with local copies, see ``datasets.load_rows``; None reads from the hub or its cache.

    Raises:
        DFlashError: an unknown task, or a dataset that cannot be reached.
    """
    check_name(name)
    if name in (*offline.TASKS, *offline.MIXTURES):
        return offline.load(name, count, seed)
    if name in repeats.TASK_NAMES:
        return repeats.load(name, count, seed)
    found = offline.wild_questions() if name == offline.WILD else questions(name, data_dir)
    return found if count >= len(found) else Random(seed).sample(found, count)
