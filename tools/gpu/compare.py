"""Servers of one tiny pair against plain decoding, in bfloat16.

Greedy texts are compared token by token; they may differ only where the target is nearly undecided.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.near_tie import BF16_GAP, divergence
from tests.support.prompts import corpus
from tools.gpu.run_step import Run

EAGER = ("--disable-cuda-graph",)


@dataclass(frozen=True)
class Arm:
    """A way to serve a pair.

    Attributes:
        flags: of the server.
        variables: of its environment.
        ours: whether our worker serves; else SGLang's own.
        cached: whether the second round of prompts must hit the first one's prefixes.
    """

    flags: tuple[str, ...] = ()
    variables: tuple[tuple[str, str], ...] = ()
    ours: bool = True
    cached: bool = False


def compare(run: Run, pair: str, arms: Mapping[str, Arm]) -> bool:
    """Decode plainly, then with each arm and each attention backend there is. False if one went wrong."""
    prompts, tokens = (32, 128) if run.real else (2, 12)
    inputs, plain = [prompt[-96:] for prompt in corpus(pair, prompts)], list[Answer]()
    attempt = {"pair": pair, "arm": "plain", "attempt": time.time()}  # every run needs its texts
    if not (passed := run.measure(attempt, partial(_decode_plainly, run, pair, inputs, tokens, plain))):
        return False
    for name, arm in arms.items():
        for backend in run.backends if arm.ours else run.backends[:1]:
            if run.real or arm.ours:  # without a device SGLang's own worker needs a shim
                key = {"pair": pair, "arm": name, "backend": backend}
                passed &= run.measure(key, partial(_speculate, run, pair, arm, backend, inputs, tokens, plain))
    return passed


def _decode_plainly(run: Run, pair: str, inputs: list[list[int]], tokens: int, plain: list[Answer]) -> dict[str, Any]:
    """Fill ``plain`` with the texts to compare with."""
    with run.serve(pair, speculative=False) as server:
        start = time.perf_counter()
        plain += generate_all(server, inputs, 8, tokens, return_logprob=True, top_logprobs_num=2)
        return _speed(plain, time.perf_counter() - start)


def _speculate(
    run: Run, pair: str, arm: Arm, backend: str, inputs: list[list[int]], tokens: int, plain: list[Answer]
) -> dict[str, Any]:
    """Compare an arm's texts with plain decoding's, at concurrency 8 and 1."""
    near_ties, wrong, found = 0, [], []
    switch = {} if arm.ours else {"SGLANG_DFLASH": "builtin"}
    with run.serve(pair, *arm.flags, backend=backend, **dict(arm.variables), **switch) as server:
        start = time.perf_counter()
        for concurrency in (8, 1):
            if not arm.cached:
                flush(server)
            found += generate_all(server, inputs, concurrency, tokens)
        row = _speed(found, time.perf_counter() - start)
        if arm.ours:
            info = server.get("/server_info").json()["internal_states"][0]["sglang_dflash"]
            assert_nothing_leaked(server)
            row |= {"accept": info["mean_accept_length"], "states": info["states"], "widths": info["steps_by_width"]}
    for ours, reference in zip(found, 2 * plain, strict=True):
        tops = [[(value, token) for value, token, *_ in top] for top in reference.meta["output_top_logprobs"]]
        try:
            near_ties += divergence(ours.tokens, reference.tokens, tops, BF16_GAP) is not None
        except AssertionError as error:
            wrong.append(str(error))
    row |= {"texts": len(found), "near_ties": near_ties, "wrong": len(wrong)}
    if arm.cached and not any(answer.meta["cached_tokens"] for answer in found):
        wrong.append("no prefix was hit")
    return row | ({"error": wrong[0]} if wrong else {})


def _speed(answers: list[Answer], seconds: float) -> dict[str, Any]:
    return {"tokens_per_second": round(sum(len(answer.tokens) for answer in answers) / seconds, 1)}
