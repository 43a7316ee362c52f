"""Steps with servers of the tiny pairs, in bfloat16: texts against plain decoding, and steps in which a wait raises.

Greedy texts may differ from plain decoding's only where the target is nearly undecided.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_dflash.plan.settings import COPIES_SWITCH as COPIES
from sglang_dflash.plan.settings import REPLAY_SWITCH as REPLAY
from tests.support.generation import BF16_GAP, Answer, assert_nothing_leaked, divergence, flush, generate_all, tops_of
from tests.support.pair_servers import RANDOM_WIDTHS, WIDE, strict, worker_info
from tests.support.prompts import corpus
from tools.gpu.run import Run

PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
EAGER = ("--disable-cuda-graph",)
CACHED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")


@dataclass(frozen=True)
class Arm:
    """A way to serve a pair; ``ours``: with our worker, not SGLang's."""

    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    ours: bool = True


# States are replayed by default for a 27B target; a tiny pair has memory to keep every state.
REPLAYED = {
    "graphs": (),
    "widths at random": (*RANDOM_WIDTHS, *WIDE),
    "prefix hits": CACHED,
    "padding rows": ("--cuda-graph-bs-decode", "3"),
    "draft window": ("--speculative-draft-window-size", "64"),
    # A hit in the middle of a window shortens it.
    "widths, prefix hits, window": (*RANDOM_WIDTHS, *CACHED, "--speculative-draft-window-size", "24"),
}
ARMS = {
    "graphs": Arm(),
    "eager": Arm(EAGER),
    "graphs, no overlap": Arm(("--disable-overlap-schedule",)),
    "graphs, widths at random and copies": Arm((*RANDOM_WIDTHS, *WIDE)),
    "eager, widths at random and copies": Arm((*RANDOM_WIDTHS, *EAGER)),
    "graphs, copies": Arm(environment=((COPIES, "1"),)),
    "builtin": Arm(environment=(("SGLANG_DFLASH", "builtin"),), ours=False),
}


def replay(run: Run) -> bool:
    return compare(run, "tiny-hybrid", {name: Arm(flags, ((REPLAY, "1"),)) for name, flags in REPLAYED.items()})


def engine(run: Run) -> bool:
    passed = [compare(run, pair, ARMS) for pair in run.pairs or PAIRS]  # all pairs, even after a failure
    return all(passed)


def compare(run: Run, pair: str, arms: Mapping[str, Arm]) -> bool:
    """Decode plainly, then with each arm and each installed attention backend. Return False if one failed."""
    prompts, tokens = (32, 128) if run.real else (2, 12)
    inputs, plain = [prompt[-96:] for prompt in corpus(pair, prompts)], list[Answer]()

    def decode_plainly() -> dict[str, Any]:
        with run.serve(pair, speculative=False) as server:
            start = time.perf_counter()
            plain.extend(generate_all(server, inputs, 8, tokens, return_logprob=True, top_logprobs_num=8))
            return _speed(plain, start)

    def speculate(arm: Arm, backend: str) -> dict[str, Any]:
        """Compare an arm's texts with plain decoding's, at concurrency 8 and 1."""
        found, cached = list[Answer](), set(CACHED) <= set(arm.flags)
        environment = {"SGLANG_DFLASH_STAGE_TIMES": "1", **dict(arm.environment)}
        with run.serve(pair, *arm.flags, backend=backend, **environment) as server:
            start = time.perf_counter()
            for concurrency in (8, 1):
                if not cached:  # otherwise the second round must find the first round's prefixes
                    flush(server)
                found += generate_all(server, inputs, concurrency, tokens)
            row = _speed(found, start)
            if arm.ours:
                info = worker_info(server)
                assert_nothing_leaked(server)
                row |= {"accept": info["mean_accept_length"], "states": info["states"]}
                row |= {"widths": info["steps_by_width"], "stage_seconds": info["stage_seconds"]}
        near_ties, wrong = 0, []
        for ours, reference in zip(found, 2 * plain, strict=True):
            try:
                near_ties += divergence(ours.tokens, reference.tokens, tops_of(reference), BF16_GAP) is not None
            except AssertionError as error:
                wrong.append(str(error))
        row |= {"texts": len(found), "near_ties": near_ties, "wrong": len(wrong)}
        if cached and not any(answer.meta["cached_tokens"] for answer in found):
            wrong.append("no prefix was hit")
        return row | ({"error": wrong[0]} if wrong else {})

    # Every call needs the texts: the time makes each attempt a new key.
    if not run.measure({"pair": pair, "arm": "plain", "attempt": time.time()}, decode_plainly):
        return False
    return run.measure_each(
        ({"pair": pair, "arm": name, "backend": backend}, partial(speculate, arm, backend))
        for name, arm in arms.items()
        if run.real or arm.ours  # SGLang's own worker needs a device
        for backend in (run.backends if arm.ours else run.backends[:1])
    )


def _speed(answers: list[Answer], start: float) -> dict[str, Any]:
    tokens = sum(len(answer.tokens) for answer in answers)
    return {"tokens_per_second": round(tokens / (time.perf_counter() - start), 1)}


# Kind -> sampling parameters.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


def nosync(run: Run) -> bool:
    """Serve each kind of request; a step in which the host waits for the device ends the server."""
    return run.measure_each(({"pair": pair}, partial(_without_waits, run, pair)) for pair in run.pairs or PAIRS)


def _without_waits(run: Run, pair: str) -> dict[str, Any]:
    number, tokens = (16, 64) if run.real else (2, 24)
    inputs, found = [prompt[-64:] for prompt in corpus(pair, number)], {}
    environment = {REPLAY: "1" if pair != "tiny-dense" else ""}
    with run.serve(pair, *RANDOM_WIDTHS, **environment, **strict()) as server:
        for kind, sampling in REQUESTS.items():
            answers = generate_all(server, inputs, 8, tokens, sampling_params=sampling)
            found[kind] = sum(len(answer.tokens) for answer in answers)
        assert_nothing_leaked(server)
    return {"tokens": found}
