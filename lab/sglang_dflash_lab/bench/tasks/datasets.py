"""The public benchmarks of the model cards: where they are, how they are asked, how they are graded.

Prompt texts are those of ``model/utils.py`` and ``dflash/benchmark.py`` of github.com/z-lab/dflash, byte for byte: an
accept length is a property of the prompt, so figures compare with the cards' only on the cards' prompts.
Nothing there grades an answer; the graders are ours and say in ``grading/`` what they accept.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.tasks import answers
from sglang_dflash_lab.bench.tasks.question import Grader, Question, ask

Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A dataset's place on the hub.

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


_STEP_BY_STEP = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def _gsm8k(index: int, row: Row) -> Question:
    expected = row["answer"].rpartition("####")[2].strip()
    return ask(str(index), row["question"] + _STEP_BY_STEP, lambda text: answers.same_number(expected, text))


def _math500(index: int, row: Row) -> Question:
    identifier = row.get("unique_id", str(index))
    return ask(identifier, row["problem"] + _STEP_BY_STEP, lambda text: answers.same_formula(row["answer"], text))


def _humaneval(_index: int, row: Row) -> Question:
    prompt = (
        "Write a solution to the following problem and make sure that it passes the tests:\n"
        f"```python\n{row['prompt']}\n```"
    )
    name = row["entry_point"]
    header = row["prompt"].partition(f"def {name}")[0]
    tests = f"{row['test']}\ncheck({name})\n"
    return ask(row["task_id"], prompt, lambda text: answers.passes(header + answers.code_block(text, name), tests))


def _mbpp(_index: int, row: Row) -> Question:
    tests = "\n".join([*row.get("test_imports", []), *row["test_list"]])
    return ask(str(row["task_id"]), row["prompt"], lambda text: answers.passes(answers.code_block(text), tests))


def _mt_bench(_index: int, row: Row) -> Question:
    first, *rest = row["prompt"]
    identifier = str(row["prompt_id"])
    return Question(identifier, ({"role": "user", "content": first},), follow_ups=tuple(rest))


def _alpaca(index: int, row: Row) -> Question:
    prompt = f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else row["instruction"]
    return ask(str(index), prompt)


_LCB_INSTRUCTION = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program"
)


_LCB_LATER_FILES = [f"test{i}.jsonl" for i in range(2, 7)]


def _livecodebench(_index: int, row: Row) -> Question:
    starter = row.get("starter_code")
    if starter:
        form, code = "### Format: Use the following code structure:", starter
    else:
        form, code = "### Format: Write your code in the following format:", "# YOUR CODE HERE"
    prompt = (
        f"{_LCB_INSTRUCTION}\n\n### Question:\n{row['question_content']}\n\n{form}\n```python\n{code}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    )
    return ask(row["question_id"], prompt, _livecodebench_grader(row))


def _livecodebench_grader(row: Row) -> Grader:
    """Runs the row's public tests; the private ones are pickles, which we do not load from a download."""
    cases = json.loads(row["public_test_cases"])
    function = json.loads(row.get("metadata") or "{}").get("func_name")
    return lambda text: answers.passes_cases(answers.code_block(text), cases, function)


DATASETS: dict[str, tuple[Source, Callable[[int, Row], Question]]] = {
    "gsm8k": (Source("openai/gsm8k", "test", "main"), _gsm8k),
    "math500": (Source("HuggingFaceH4/MATH-500", "test"), _math500),
    "humaneval": (Source("openai/openai_humaneval", "test"), _humaneval),
    "mbpp": (Source("google-research-datasets/mbpp", "test", "sanitized"), _mbpp),
    "mt-bench": (Source("HuggingFaceH4/mt_bench_prompts", "train"), _mt_bench),
    "alpaca": (Source("tatsu-lab/alpaca", "train"), _alpaca),
    "livecodebench": (
        Source("livecodebench/code_generation_lite", "test", files=("test.jsonl", *_LCB_LATER_FILES)),
        _livecodebench,
    ),
}


def questions(task: str, data_dir: Path | None) -> list[Question]:
    """All questions of a task, in the order of its dataset."""
    source, to_question = DATASETS[task]
    return [to_question(index, row) for index, row in enumerate(load_rows(task, source, data_dir))]
