"""Tiny pairs in the real engine, bfloat16: our worker eager and as graphs, and SGLang's own, against plain decoding.

A row per pair and arm; ours also with another width at every step. A text may part from plain decoding's where the
target is nearly undecided, and nowhere else.
"""

from __future__ import annotations

import time
from typing import Any

from tests.support.generation import Answer, assert_nothing_leaked, flush, generate_all
from tests.support.near_tie import BF16_GAP, divergence
from tests.support.pair_servers import BFLOAT16, RANDOM_WIDTHS, draft_arguments, target_arguments
from tests.support.prompts import corpus
from tests.support.servers import Server, running
from tools.gpu.run_step import Run, main

PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
# Arm -> extra flags and environment.
ARMS: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "eager": (("--disable-cuda-graph",), {}),
    "graphs": ((), {}),
    "graphs, no overlap": (("--disable-overlap-schedule",), {}),
    "graphs, widths at random": (RANDOM_WIDTHS, {}),
    "eager, widths at random": ((*RANDOM_WIDTHS, "--disable-cuda-graph"), {}),
    "builtin": ((), {"SGLANG_DFLASH": "builtin"}),
}


def body(run: Run) -> bool:
    # Where Triton is interpreted a token takes seconds.
    prompts, tokens = (32, 128) if run.real else (4, 48) if run.device == "cpu" else (2, 8)
    passed = True
    for pair in run.pairs or PAIRS:
        inputs = [prompt[-64:] for prompt in corpus(pair, prompts)]
        plain: list[Answer] = []

        def decode_plainly(
            pair: str = pair, inputs: list[list[int]] = inputs, plain: list[Answer] = plain
        ) -> dict[str, Any]:
            with (
                run.folder() as folder,
                running(folder, *target_arguments(pair, BFLOAT16), *run.flags(speculative=False)) as server,
            ):
                start = time.perf_counter()
                plain += generate_all(server, inputs, 8, tokens, return_logprob=True, top_logprobs_num=2)
                return speed(plain, time.perf_counter() - start)

        run.measure({"pair": pair, "arm": "plain", "attempt": time.time()}, decode_plainly)
        for arm, (flags, environment) in ARMS.items():
            if run.device == "cpu" and arm == "builtin":
                continue  # it needs a shim there

            def speculate(
                pair: str = pair,
                flags: tuple[str, ...] = flags,
                environment: dict[str, str] = environment,
                inputs: list[list[int]] = inputs,
                plain: list[Answer] = plain,
            ) -> dict[str, Any]:
                with (
                    run.folder() as folder,
                    running(
                        folder,
                        *target_arguments(pair, BFLOAT16),
                        *draft_arguments(pair),
                        *run.flags(speculative=True),
                        *flags,
                        **environment,
                    ) as server,
                ):
                    return compare(server, inputs, tokens, plain)

            passed &= run.measure({"pair": pair, "arm": arm}, speculate)
    return passed


def compare(server: Server, inputs: list[list[int]], tokens: int, plain: list[Answer]) -> dict[str, Any]:
    """A server's texts against plain decoding's, at two concurrencies."""
    diverged, wrong, found = 0, [], []
    start = time.perf_counter()
    for concurrency in (8, 1):
        flush(server)
        answers = generate_all(server, inputs, concurrency, tokens)
        found += answers
        for ours, reference in zip(answers, plain, strict=True):
            tops = [[(value, token) for value, token, *_ in top] for top in reference.meta["output_top_logprobs"]]
            try:
                diverged += divergence(ours.tokens, reference.tokens, tops, BF16_GAP) is not None
            except AssertionError as error:
                wrong.append(str(error))
    row = speed(found, time.perf_counter() - start)
    info = server.get("/server_info").json()["internal_states"][0].get("sglang_dflash")
    if info:
        assert_nothing_leaked(server)
        row["accept"] = info["mean_accept_length"]
    row |= {"texts": len(found), "near_ties": diverged, "wrong": len(wrong)}
    return row | ({"error": wrong[0]} if wrong else {})


def speed(answers: list[Answer], seconds: float) -> dict[str, Any]:
    return {"tokens_per_second": round(sum(len(answer.tokens) for answer in answers) / seconds, 1)}


if __name__ == "__main__":
    main("engine", body)
