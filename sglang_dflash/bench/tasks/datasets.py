r"""The public benchmarks of the model cards: where they are, how they are asked, how they are graded.

Prompt texts are those of ``model/utils.py`` and ``dflash/benchmark.py`` of github.com/z-lab/dflash, byte for byte: an
accept length is a property of the prompt, so figures compare with the cards' only on the cards' prompts.
Nothing there grades an answer; the graders are ours and say in ``grading/`` what they accept.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from sglang_dflash.bench.grading import answers, programs
from sglang_dflash.bench.tasks.hub import Row, Source, load_rows
from sglang_dflash.bench.tasks.question import Grader, Question, ask

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
    return ask(row["task_id"], prompt, lambda text: programs.passes(header + programs.code_block(text, name), tests))


def _mbpp(_index: int, row: Row) -> Question:
    tests = "\n".join([*row.get("test_imports", []), *row["test_list"]])
    return ask(str(row["task_id"]), row["prompt"], lambda text: programs.passes(programs.code_block(text), tests))


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
    return lambda text: programs.passes_cases(programs.code_block(text), cases, function)


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
