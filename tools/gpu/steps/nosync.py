"""Steps where any wait of the host for the device raises (SGLANG_DFLASH_FORBID_SYNC): a row per kind of request."""

from __future__ import annotations

from typing import Any

from tests.support.generation import assert_nothing_leaked, generate_all
from tests.support.pair_servers import BFLOAT16, STRICT, draft_arguments, target_arguments
from tests.support.prompts import corpus
from tests.support.servers import running
from tools.gpu.run_step import Run, main

PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
SAMPLED = {"temperature": 0.8, "top_p": 0.9}
# Kind -> sampling parameters.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {**SAMPLED, "sampling_seed": 7},
    "penalties": {"frequency_penalty": 0.5, "presence_penalty": 0.2, "repetition_penalty": 1.1},
}


def body(run: Run) -> bool:
    number, tokens = (16, 64) if run.real else (4, 32) if run.device == "cpu" else (1, 4)
    passed = True
    for pair in run.pairs or PAIRS:
        if all(run.finished(device=run.device, pair=pair, requests=kind) for kind in REQUESTS):
            continue
        inputs = [prompt[-64:] for prompt in corpus(pair, number)]
        for kind, sampling in REQUESTS.items():

            def ask(
                pair: str = pair, inputs: list[list[int]] = inputs, sampling: dict[str, Any] = sampling
            ) -> dict[str, Any]:
                command = (*target_arguments(pair, BFLOAT16), *draft_arguments(pair), *run.flags(speculative=True))
                with run.folder() as folder, running(folder, *command, **STRICT) as server:
                    # A step that waits ends the server.
                    answers = generate_all(server, inputs, 8, tokens, sampling_params=sampling)
                    assert_nothing_leaked(server)
                return {"texts": len(answers), "tokens": sum(len(answer.tokens) for answer in answers)}

            passed &= run.measure({"pair": pair, "requests": kind}, ask)
    return passed


if __name__ == "__main__":
    main("nosync", body)
