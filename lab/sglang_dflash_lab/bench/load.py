"""One run of SGLang's load generator (``python -m sglang.benchmark.serving``) against one server.

It runs in this process, because importing SGLang takes longer than a short run.
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
from unittest.mock import patch

import httpx

from sglang_dflash.check.diagnose.client import WORKER_KEY
from sglang_dflash.errors import DFlashError
from sglang_dflash_lab.bench.tasks import Messages


@dataclass(frozen=True)
class Cell:
    """One cell of the table, measured once; runs of one ``repeat`` (from 0) are adjacent in time."""

    mode: str
    task: str
    concurrency: int
    repeat: int


def write_prompts(path: Path, asked: Sequence[Messages], tokenizer: str, thinking: bool | None) -> None:
    """Render conversations with the chat template; write the load generator's custom data set, one for all arms.

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
            # The second turn is required but unused.
            print(json.dumps({"conversations": [{"content": prompt}, {"content": "unused"}]}), file=file)


def measure(
    url: str, cell: Cell, prompts: Path, tokenizer: str, max_tokens: int, temperature: float, log: Path
) -> dict[str, Any]:
    """Warm up, flush the prefix cache, send every prompt once, and return the run's row.

    Sampled requests have the repeat as their seed, so all arms of our worker write the same text. ``accept_lengths``
    of the row: each answer's ``completion_tokens / spec_verify_ct``, 0 without a verify step.

    Raises:
        DFlashError: the load generator stopped, or a request failed.
    """
    sampling = {"temperature": temperature, "max_new_tokens": max_tokens, "sampling_seed": cell.repeat}
    details, count = log.with_suffix(".jsonl"), len(prompts.read_text().splitlines())
    details.unlink(missing_ok=True)
    arguments = [
        *("--backend", "sglang", "--base-url", url, "--model", tokenizer, "--tokenizer", tokenizer),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count)),
        *("--sharegpt-output-len", str(max_tokens), "--extra-request-body", json.dumps({"sampling_params": sampling})),
        *("--max-concurrency", str(cell.concurrency), "--warmup-requests", str(cell.concurrency), "--flush-cache"),
        *("--disable-tqdm", "--output-file", str(details), "--output-details"),
    ]
    before, load_average = worker_state(url), os.getloadavg()[0]
    stopped: object = None
    accept_lengths = list[float]()
    program, sys.argv = sys.argv, ["serving", *arguments]
    with log.open("w") as output, contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            from sglang.benchmark import serving

            calculate = serving.calculate_metrics

            def with_accept_lengths(*args: Any, outputs: list[Any], **kwargs: Any) -> Any:
                # `--output-details` lacks them.
                accept_lengths[:] = [each.spec_accept_length for each in outputs]
                return calculate(*args, outputs=outputs, **kwargs)

            with patch.object(serving, "calculate_metrics", with_accept_lengths):
                serving.cli_main()
        except (SystemExit, ValueError) as error:
            stopped = error
        finally:
            sys.argv = program
    if stopped is not None or not details.exists():
        raise DFlashError(f"the load generator stopped ({stopped})", remedy=f"read {log}")
    result = json.loads(details.read_text())
    details.unlink()
    # A refused stream has status 200 and no text; the load generator counts it as a full answer.
    answers = zip(result["errors"], result["generated_texts"], strict=True)
    if failed := [error or "no text" for error, text in answers if error or not text]:
        raise DFlashError(
            f"{len(failed)} of {count} requests failed, the first with {failed[0]}",
            remedy="read the server's log, or remove prompts without an answer",
        )
    kept = {name: value for name, value in result.items() if name not in ("itls", "errors", "server_info")}
    worker = growth(before, worker_state(url))
    return {**kept, "accept_lengths": accept_lengths, "load_average": load_average, "worker": worker, **vars(cell)}


def worker_state(url: str) -> dict[str, Any]:
    """Return our worker's part of ``/server_info``, empty for another."""
    states = httpx.get(f"{url}/server_info", timeout=60, trust_env=False).raise_for_status().json()["internal_states"]
    worker: dict[str, Any] = states[0].get(WORKER_KEY, {})
    return worker


def growth(before: dict[str, Any], after: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return what was added to each of the worker's tables of counts, by name and key."""
    return {
        name: {key: value - before.get(name, {}).get(key, 0) for key, value in counter.items()}
        for name, counter in after.items()
        if isinstance(counter, dict) and all(isinstance(value, int | float) for value in counter.values())
    }
