"""Steps where any wait of the host for the device raises (SGLANG_DFLASH_FORBID_SYNC): a row per kind of request."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.pair_servers import STRICT
from tests.support.prompts import corpus
from tools.gpu.run_step import TINY_PAIRS, Run, main

# Kind -> sampling parameters.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


def body(run: Run) -> bool:
    return run.measure_each(
        ({"pair": pair, "requests": kind}, partial(ask, run, pair, kind))
        for pair in run.pairs or TINY_PAIRS
        for kind in REQUESTS
    )


def ask(run: Run, pair: str, kind: str) -> dict[str, Any]:
    """Serve some requests; a step that waits ends the server."""
    number, tokens = (16, 64) if run.real else (4, 32)
    inputs = [prompt[-64:] for prompt in corpus(pair, number)]
    with run.serve(pair, **STRICT) as server:
        answers = generate_all(server, inputs, 8, tokens, sampling_params=REQUESTS[kind])
        assert_nothing_leaked(server)
    return {"texts": len(answers), "tokens": sum(len(answer.tokens) for answer in answers)}


if __name__ == "__main__":
    main("nosync", body)
