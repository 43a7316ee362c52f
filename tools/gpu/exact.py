"""The step of exact mode: kernels and rows against plain decoding's, then texts of the tiny pairs, bit by bit."""

from __future__ import annotations

import os
import subprocess
import time
from functools import partial
from typing import Any

from sglang_dflash.plan.settings import DETERMINISTIC_FLAG
from sglang_dflash.plan.settings import REPLAY_SWITCH as REPLAY
from tests.support.generation import Answer, assert_nothing_leaked, generate_all
from tests.support.pair_servers import RANDOM_WIDTHS, worker_info
from tests.support.prompts import corpus, random_prompts
from tools.gpu.checks import PYTEST
from tools.gpu.run import Run
from tools.gpu.site import ROOT

CASES = "tests/states/exact_cases.py"
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "kept": ((), {REPLAY: "0"}),
    "replayed": ((), {REPLAY: "1"}),
    "replayed, widths at random": (RANDOM_WIDTHS, {REPLAY: "1"}),
}
TOP = 4  # log-probabilities compared at every position


def exact(run: Run) -> bool:
    """Compare the kernels, then 200 prompts of each pair."""
    passed = [run.measure({"cases": CASES}, partial(_cases, run))]
    for pair in run.pairs or ("tiny-hybrid", "tiny-dense", "tiny-moe"):
        passed.append(_texts(run, pair))
    return all(passed)


def _cases(run: Run) -> dict[str, Any]:
    device, interpret = ("cuda", "0") if run.real else ("cpu", "1")
    environment = {**os.environ, "OPS_DEVICE": device, "TRITON_INTERPRET": interpret}
    ended = subprocess.run([*PYTEST, CASES], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    last = (ended.stdout.strip().splitlines() or ["no output"])[-1]
    return {"result": last, **({"error": ended.stdout[-4000:] + last} if ended.returncode else {})}


def _texts(run: Run, pair: str) -> bool:
    number, tokens = (100, 96) if run.real else (2, 12)
    inputs = [*(prompt[-96:] for prompt in corpus(pair, number)), *random_prompts(pair, number)]
    plain = list[Answer]()
    flags = (DETERMINISTIC_FLAG, *(("--moe-runner-backend", "triton") if pair == "tiny-moe" else ()))
    asked: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": TOP}

    def decode_plainly() -> dict[str, Any]:
        with run.serve(pair, *flags, speculative=False) as server:
            plain.extend(generate_all(server, inputs, 8, tokens, **asked))
        return {"texts": len(plain)}

    def speculate(more: tuple[str, ...], environment: dict[str, str]) -> dict[str, Any]:
        with run.serve(pair, *flags, *more, **environment) as server:
            assert worker_info(server)["exact"] is True, worker_info(server)["exact"]
            found = generate_all(server, inputs, 8, tokens, **asked)
            row = {"texts": len(found), "accept": worker_info(server)["mean_accept_length"]}
            assert_nothing_leaked(server)
        pairs = list(zip(found, plain, strict=True))
        row["different"] = sum(one.tokens != other.tokens for one, other in pairs)
        row["other_logprobs"] = sum(logprobs(one) != logprobs(other) for one, other in pairs)
        wrong = row["different"] or row["other_logprobs"]
        return row | ({"error": f"{pair}: {row}"} if wrong else {})

    # Every call needs the texts: the time makes each attempt a new key.
    if not run.measure({"pair": pair, "arm": "plain", "attempt": time.time()}, decode_plainly):
        return False
    return run.measure_each(
        ({"pair": pair, "arm": name}, partial(speculate, *arm))
        for name, arm in ARMS.items()
        if pair != "tiny-dense" or name != "kept"
    )


def logprobs(answer: Answer) -> list[Any]:
    """Every reported log-probability with its token."""
    meta = answer.meta
    chosen, tops = meta["output_token_logprobs"], meta["output_top_logprobs"]
    return [[(value, token) for value, token, *_ in position] for position in (chosen, *tops)]
