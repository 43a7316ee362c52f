"""Steps with servers of the tiny pairs, in bfloat16: texts against plain decoding, and steps in which a wait raises."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from sglang_dflash.plan.settings import COPIES_SWITCH as COPIES
from sglang_dflash.plan.settings import DETERMINISTIC_FLAG
from sglang_dflash.plan.settings import REPLAY_SWITCH as REPLAY
from tests.support.generation import BF16_GAP, Answer, assert_nothing_leaked, divergence, flush, generate_all, tops_of
from tests.support.prompts import corpus, random_prompts
from tests.support.servers import RANDOM_WIDTHS, WIDE, strict, worker_info
from tools.gpu.checks import compared
from tools.gpu.run import BUILTIN, Arm, Run

PAIRS = ("tiny-hybrid",)  # unless --pairs names others
CACHED = ("--mamba-radix-cache-strategy", "extra_buffer", "--mamba-track-interval", "64")
ARMS = {
    "graphs": Arm(),
    "builtin": BUILTIN,
    "eager": Arm(("--disable-cuda-graph",)),
    "graphs without overlap": Arm(("--disable-overlap-schedule",)),
    "graphs at random widths with copies": Arm((*RANDOM_WIDTHS, *WIDE)),
    "eager at random widths with copies": Arm((*RANDOM_WIDTHS, "--disable-cuda-graph")),
    "graphs with copies": Arm(environment=((COPIES, "1"),)),
}
# States are replayed by default for a 27B target; a tiny pair has memory to keep every state.
REPLAYED = ((REPLAY, "1"),)
REPLAY_ARMS = {
    "graphs": Arm((), REPLAYED),
    "widths at random": Arm((*RANDOM_WIDTHS, *WIDE), REPLAYED),
    "prefix hits": Arm(CACHED, REPLAYED),
    "padding rows": Arm(("--cuda-graph-bs-decode", "3"), REPLAYED),
    "draft window": Arm(("--speculative-draft-window-size", "64"), REPLAYED),
    # A hit in the middle of a window shortens it.
    "random hits in a window": Arm((*RANDOM_WIDTHS, *CACHED, "--speculative-draft-window-size", "24"), REPLAYED),
}
EXACT_CASES = "tests/states/exact_cases.py"
EXACT_ARMS = {
    "replayed": Arm((), REPLAYED),
    "replayed at random widths": Arm(RANDOM_WIDTHS, REPLAYED),
    "kept": Arm((), ((REPLAY, "0"),)),
}
# Kind -> sampling parameters.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


def engine(run: Run) -> bool:
    arms = run.chosen(ARMS, ("graphs", "builtin"))
    passed = [compare(run, pair, arms) for pair in run.pairs or PAIRS]  # all pairs, even after a failure
    return all(passed)


def replay(run: Run) -> bool:
    return compare(run, "tiny-hybrid", run.chosen(REPLAY_ARMS))


def exact(run: Run) -> bool:
    """Compare kernels and rows with plain decoding's, then texts, bit by bit."""
    passed = [run.measure({"cases": EXACT_CASES}, partial(compared, run, EXACT_CASES))]
    passed += [compare(run, pair, run.chosen(EXACT_ARMS), exact=True) for pair in run.pairs or PAIRS]
    return all(passed)


def compare(run: Run, pair: str, arms: Mapping[str, Arm], *, exact: bool = False) -> bool:
    """Decode plainly, then with each arm and each installed attention backend. Return False if one failed.

    Args:
        exact: compare in exact mode, log-probabilities too, and prompts of random tokens; otherwise texts may differ
            where the target is nearly undecided.
    """
    number, tokens, length = (100 if exact else 32, 128, 96) if run.real else (2, 12, 24 if "builtin" in arms else 96)
    inputs, plain = [prompt[-length:] for prompt in corpus(pair, number)], list[Answer]()
    logprobs: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 8}
    flags: tuple[str, ...] = ()
    if exact:
        inputs += random_prompts(pair, number)
        flags = (DETERMINISTIC_FLAG, *(("--moe-runner-backend", "triton") if pair == "tiny-moe" else ()))

    def decode_plainly() -> dict[str, Any]:
        with run.serve(pair, *flags, speculative=False) as server:
            plain.extend(generate_all(server, inputs, 8, tokens, **logprobs))
        return {"texts": len(plain)}

    def speculate(arm: Arm, backend: str) -> dict[str, Any]:
        found, cached = list[Answer](), set(CACHED) <= set(arm.flags)
        with run.serve(pair, *flags, *arm.flags, backend=backend, **dict(arm.environment)) as server:
            for concurrency in (8, 1):
                if not cached:  # otherwise the second round must find the first round's prefixes
                    flush(server)
                found += generate_all(server, inputs, concurrency, tokens, **(logprobs if exact else {}))
            info = worker_info(server) if arm.ours else {}
            if arm.ours:
                assert_nothing_leaked(server)
        assert info.get("exact") is True or not exact, info
        near_ties, wrong = 0, []
        for ours, reference in zip(found, 2 * plain, strict=True):
            try:
                near_ties += divergence(ours.tokens, reference.tokens, tops_of(reference), BF16_GAP) is not None
            except AssertionError as error:
                wrong.append(str(error))
            if exact and (ours.tokens, reported(ours)) != (reference.tokens, reported(reference)):
                wrong.append(f"bits differ: {ours.tokens} for {reference.tokens}")
        shown = ("mean_accept_length", "states", "steps_by_width")
        row = {name: info[name] for name in shown if name in info}
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
        for backend in (run.backends if arm.ours and not exact else run.backends[:1])
    )


def reported(answer: Answer) -> list[Any]:
    """Return every reported log-probability with its token."""
    chosen, tops = answer.meta["output_token_logprobs"], answer.meta["output_top_logprobs"]
    return [[(value, token) for value, token, *_ in position] for position in (chosen, *tops)]


def nosync(run: Run) -> bool:
    """Serve each kind of request; a step in which the host waits for the device ends the server."""
    return run.measure_each(({"pair": pair}, partial(_without_waits, run, pair)) for pair in run.pairs or PAIRS)


def _without_waits(run: Run, pair: str) -> dict[str, Any]:
    # On a CPU below the track boundary, where the CPU platform reads a mask.
    number, tokens, length = (16, 64, 64) if run.real else (2, 12, 16)
    inputs, found = [prompt[-length:] for prompt in corpus(pair, number)], {}
    environment = {REPLAY: "1" if pair != "tiny-dense" else ""}
    with run.serve(pair, *RANDOM_WIDTHS, **environment, **strict()) as server:
        for kind, sampling in REQUESTS.items():
            answers = generate_all(server, inputs, 8, tokens, sampling_params=sampling)
            found[kind] = sum(len(answer.tokens) for answer in answers)
        assert_nothing_leaked(server)
    return {"tokens": found}
