"""The tiny pairs in the real engine, bfloat16: our worker with and without graphs, and SGLang's own.

Greedy text is compared with plain decoding's; it may differ only where the target is nearly undecided.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.near_tie import BF16_GAP, divergence
from tests.support.pair_servers import RANDOM_WIDTHS
from tests.support.prompts import corpus
from tools.gpu.run_step import TINY_PAIRS, Run, main

# Arm -> extra flags.
ARMS: dict[str, tuple[str, ...]] = {
    "eager": ("--disable-cuda-graph",),
    "graphs": (),
    "graphs, no overlap": ("--disable-overlap-schedule",),
    "graphs, widths at random": RANDOM_WIDTHS,
    "eager, widths at random": (*RANDOM_WIDTHS, "--disable-cuda-graph"),
    "builtin": (),
}


def body(run: Run) -> bool:
    prompts, tokens = (32, 128) if run.real else (4, 48)
    passed = True
    for pair in run.pairs or TINY_PAIRS:
        inputs = [prompt[-64:] for prompt in corpus(pair, prompts)]
        plain: list[Answer] = []
        key = {"pair": pair, "arm": "plain", "attempt": time.time()}  # every run needs its texts
        passed &= run.measure(key, partial(decode_plainly, run, pair, inputs, tokens, plain))
        for arm in ARMS:
            if run.real or arm != "builtin":  # on a CPU it needs a shim
                passed &= run.measure(
                    {"pair": pair, "arm": arm}, partial(speculate, run, pair, arm, inputs, tokens, plain)
                )
    return passed


def decode_plainly(run: Run, pair: str, inputs: list[list[int]], tokens: int, plain: list[Answer]) -> dict[str, Any]:
    """Fill ``plain`` with the texts to compare with."""
    with run.serve(pair, speculative=False) as server:
        start = time.perf_counter()
        plain += generate_all(server, inputs, 8, tokens, return_logprob=True, top_logprobs_num=2)
        return speed(plain, time.perf_counter() - start)


def speculate(
    run: Run, pair: str, arm: str, inputs: list[list[int]], tokens: int, plain: list[Answer]
) -> dict[str, Any]:
    """Compare an arm's texts with plain decoding's, at concurrency 8 and 1."""
    near_ties, wrong, found = 0, [], []
    switch = {"SGLANG_DFLASH": "builtin"} if arm == "builtin" else {}
    with run.serve(pair, *ARMS[arm], **switch) as server:
        start = time.perf_counter()
        for concurrency in (8, 1):
            flush(server)
            found += generate_all(server, inputs, concurrency, tokens)
        row = speed(found, time.perf_counter() - start)
        if info := server.get("/server_info").json()["internal_states"][0].get("sglang_dflash"):
            assert_nothing_leaked(server)
            row["accept"] = info["mean_accept_length"]
    for ours, reference in zip(found, 2 * plain, strict=True):
        tops = [[(value, token) for value, token, *_ in top] for top in reference.meta["output_top_logprobs"]]
        try:
            near_ties += divergence(ours.tokens, reference.tokens, tops, BF16_GAP) is not None
        except AssertionError as error:
            wrong.append(str(error))
    row |= {"texts": len(found), "near_ties": near_ties, "wrong": len(wrong)}
    return row | ({"error": wrong[0]} if wrong else {})


def speed(answers: list[Answer], seconds: float) -> dict[str, Any]:
    return {"tokens_per_second": round(sum(len(answer.tokens) for answer in answers) / seconds, 1)}


if __name__ == "__main__":
    main("engine", body)
