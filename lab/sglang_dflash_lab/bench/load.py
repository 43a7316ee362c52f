"""One measured run: SGLang's own load generator (``python -m sglang.benchmark.serving``) against one server.

It runs inside this process, since importing SGLang for each run takes longer than a short run.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash.check.diagnose.client import WORKER_KEY
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.tasks import Messages


@dataclass(frozen=True)
class Cell:
    """One cell of the table, measured once: the unit of alternation, resumption and bootstrap.

    Attributes:
        mode: the arm's label, as given in ``--modes``.
        task: name of the task.
        concurrency: requests in flight.
        repeat: 0-based repetition; runs with the same ``repeat`` are neighbours in time.
    """

    mode: str
    task: str
    concurrency: int
    repeat: int


def write_prompts(path: Path, asked: Sequence[Messages], tokenizer: str, thinking: bool | None) -> None:
    """Render conversations with the tokenizer's chat template and write them as the load generator's custom data set.

    Every arm gets this file, so every arm gets the same prompts in the same order.

    Args:
        thinking: the chat template's switch; None uses the template's default.
    """
    from transformers import AutoTokenizer

    template = AutoTokenizer.from_pretrained(tokenizer)
    switch = {} if thinking is None else {"enable_thinking": thinking}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for messages in asked:
            prompt = template.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True, **switch)
            # The second turn is required, and unused: the length of an answer is set by the run.
            print(json.dumps({"conversations": [{"content": prompt}, {"content": "unused"}]}), file=file)


def measure(
    url: str, cell: Cell, prompts: Path, tokenizer: str, max_tokens: int, temperature: float, log: Path
) -> dict[str, Any]:
    """Warm up, empty the prefix cache, send every prompt once, and return the run's row of the results.

    Args:
        prompts: file of :func:`write_prompts`.
        log: file for the load generator's output.

    Raises:
        DFlashError: the load generator stopped, or a request failed.
    """
    details, count = log.with_suffix(".jsonl"), len(prompts.read_text().splitlines())
    details.unlink(missing_ok=True)
    arguments = [
        *("--backend", "sglang", "--base-url", url, "--model", tokenizer, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count)),
        *("--sharegpt-output-len", str(max_tokens), "--temperature", str(temperature)),
        *("--max-concurrency", str(cell.concurrency), "--warmup-requests", str(cell.concurrency), "--flush-cache"),
        *("--disable-ignore-eos", "--disable-tqdm", "--output-file", str(details), "--output-details"),
    ]
    before, load_average = _internal_state(url), os.getloadavg()[0]
    stopped: object = None
    program, sys.argv = sys.argv, ["serving", *arguments]
    with log.open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            from sglang.benchmark import serving

            serving.cli_main()
        except (SystemExit, ValueError) as error:  # a bad option, or a warm-up without an answer
            stopped = error
        finally:
            sys.argv = program
    if stopped is not None or not details.exists():
        raise DFlashError(f"the load generator stopped ({stopped})", expected="a finished run", remedy=f"read {log}")
    result = json.loads(details.read_text())
    details.unlink()
    # A refused stream has status 200 and no text; the load generator would count it with all the tokens of the limit.
    answers = zip(result["errors"], result["generated_texts"], strict=True)
    if failed := [error or "no text" for error, text in answers if error or not text]:
        raise DFlashError(
            f"{len(failed)} of {count} requests failed, the first with {failed[0]}",
            expected="an answer to every request",
            remedy="read the server's log, or remove prompts that the model answers with nothing",
        )
    kept = {name: value for name, value in result.items() if name not in ("itls", "errors", "server_info")}
    worker = _growth(before, _internal_state(url))
    return {**kept, "load_average": load_average, "worker": worker, **vars(cell)}


def _internal_state(url: str) -> dict[str, Any]:
    """Return our worker's part of ``/server_info``; empty for another worker."""
    states = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()["internal_states"]
    worker: dict[str, Any] = states[0].get(WORKER_KEY, {})
    return worker


def _growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return by how much each counter of our worker grew (its entries that are dictionaries of numbers)."""
    return {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counter.items()}
        for name, counter in after.items()
        if isinstance(counter, dict) and all(isinstance(value, int | float) for value in counter.values())
    }
