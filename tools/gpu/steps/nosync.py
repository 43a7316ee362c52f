"""Steps where any wait of the host for the device raises : a row per pair, states replayed."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_dflash.states.choice import SWITCH
from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.pair_servers import RANDOM_WIDTHS, STRICT
from tests.support.prompts import corpus
from tools.gpu.run_step import TINY_PAIRS, Run, main

# Kind -> sampling parameters.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "top_p": 0.9, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


def body(run: Run) -> bool:
    return run.measure_each(({"pair": pair}, partial(ask, run, pair)) for pair in run.pairs or TINY_PAIRS)


def ask(run: Run, pair: str) -> dict[str, Any]:
    """Serve each kind of request; a step that waits ends the server."""
    number, tokens = (16, 64) if run.real else (2, 24)
    inputs, found = [prompt[-64:] for prompt in corpus(pair, number)], {}
    variables = {SWITCH: "1" if pair != "tiny-dense" else ""}
    # Without a device, what SGLang reads on the host cannot be told from what it would wait for.
    strict = STRICT if run.real else {}
    with run.serve(pair, *RANDOM_WIDTHS, **variables, **strict) as server:
        for kind, sampling in REQUESTS.items():
            answers = generate_all(server, inputs, 8, tokens, sampling_params=sampling)
            found[kind] = sum(len(answer.tokens) for answer in answers)
        assert_nothing_leaked(server)
    return {"tokens": found}


if __name__ == "__main__":
    main("nosync", body)
