"""Run kits against a running server: ``python -m tests.kits.attached URL MODEL PID OUT KIT ...``.

A kit's methods run verbatim. They were written for models with a larger vocabulary and context: a request's token ids
and lengths are cut to those of a tiny pair.
"""

from __future__ import annotations

import importlib
import json
import random
import re
import signal
import sys
import unittest
from pathlib import Path
from typing import Any

import openai
import psutil
import requests
from sglang.test.server_fixtures import streaming_session_fixture
from sglang.test.server_fixtures.spec_eagle_fixture import SpecEagleServerBase

SECONDS = 900  # of a kit; the alarm ends the process
VOCAB, LONGEST = 1024, 4000  # of the tiny pairs, tokens of a prompt
PROMPT_IDS = [[20 + (7 * group + n * n) % 900 for n in range(640)] for group in range(6)]
# what a kit leaves to its server: thresholds of float32 and of a pair that drafts strange text badly, and smaller loads
CHOSEN = {
    "api_key": "none", "reasoning_parser_name": "qwen3", "cache_chunk_size": 64, "prefix_len": 384,
    "input_ids": PROMPT_IDS, "acc_length_thres": 1.0, "batch_accept_len_thres": 1.0, "logprob_match_delta": 0.01,
    "kl_threshold": 1e-4, "max_new_tokens": 96, "abort_all_max_new_tokens": 4000, "pause_num_requests": 12,
    "pause_max_new_tokens": 1024, "pause_ignore_eos": True,
}  # fmt: skip
send = requests.Session.request


def fit(ids: Any) -> Any:
    if isinstance(ids, list) and ids and isinstance(ids[0], int):
        return [each if each < VOCAB else 20 + each % (VOCAB - 100) for each in ids[-LONGEST:]]
    return [fit(each) for each in ids] if isinstance(ids, list) else ids


def send_fitting(self: Any, method: str, url: str, **options: Any) -> requests.Response:
    body = options.get("json")
    if isinstance(body, dict):
        named = {key: fit(body[key]) for key in ("input_ids", "token_ids_logprob") if key in body}
        options["json"] = {**body, **named}
    return send(self, method, url, **{"timeout": 60, **options})


class Attached(SpecEagleServerBase):
    """SGLang's fixture with its helpers, for a server that runs."""

    pid: int

    @classmethod
    def setUpClass(cls) -> None:
        cls._tokenizer, cls.target_model, cls.served_model_name = None, cls.model, cls.model
        cls.process = psutil.Process(cls.pid)
        cls.process.poll = lambda: None if cls.process.is_running() else 1
        cls.client = openai.Client(api_key=cls.api_key, base_url=f"{cls.base_url}/v1")
        if hasattr(cls, "init_reasoning_token_verifier"):
            cls.init_reasoning_token_verifier()

    @classmethod
    def tearDownClass(cls) -> None:
        pass

    @classmethod
    def flush_cache(cls) -> None:
        requests.post(f"{cls.base_url}/flush_cache", params={"timeout": 60})


def main(url: str, model: str, pid: str, out: str, *kits: str) -> None:
    """Append a row per test, and one per kit that leaves the server healthy; end at the first that does not."""
    requests.Session.request = send_fitting
    streaming_session_fixture.CONCURRENT_LOGPROB_ROUNDS = 2  # 10 on a GPU
    for path in kits:
        signal.alarm(SECONDS)
        module, _, name = path.rpartition(".")
        served = {"base_url": url, "model": model, "pid": int(pid)}
        attached = type(name, (getattr(importlib.import_module(module), name), Attached), CHOSEN | served)
        attached.setUpClass()
        for test in unittest.defaultTestLoader.getTestCaseNames(attached):
            if test == "test_gsm8k":  # a data set
                continue
            random.seed(0)
            result = unittest.TestResult()
            attached(test).run(result)
            # the first exception: SGLang's tests raise another one when they give up
            errors = [text for _, text in (*result.failures, *result.errors)]
            problems = [
                line for text in errors for line in text.splitlines() if re.match(r"[\w.]+(Error|Exception)", line)
            ]
            skipped = [f"skipped: {reason}" for _, reason in result.skipped]
            write(out, test=f"{name}.{test}", failure=next(iter(skipped + problems + errors), None))
        requests.get(f"{url}/health_generate", timeout=60).raise_for_status()
        write(out, kit=path)


def write(out: str, **row: Any) -> None:
    with Path(out).open("a") as file:
        file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
