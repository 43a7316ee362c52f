"""A decode step's time at the five pairs' published dimensions: ours beside SGLang's own worker, batch 1 to 64.

Weights are random and accept lengths simulated (SGLang's SGLANG_SIMULATE_ACC_LEN), since a step's time depends on
neither. It is the difference of two runs that differ in their number of steps alone, so prefill and HTTP cancel.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tests.support.generation import flush
from tests.support.servers import Server, running
from tools.gpu import published
from tools.gpu.run_step import Run, main

BLOCK, ACCEPT, PROMPT = 16, 4, 128
BATCHES = (1, 2, 4, 8, 16, 32, 64)
STEPS, REPEATS = (8, 72), 3
ARMS = {"ours": "", "builtin": "builtin"}


def body(run: Run) -> bool:
    passed = True
    batches = BATCHES if run.real else (1, 2)
    for pair in run.pairs or published.PAIRS:
        for arm in ARMS:
            key = {"pair": pair, "arm": arm, "layers": run.layers}
            if run.device == "cpu" and arm == "builtin":
                continue  # it needs a shim there
            if all(run.finished(device=run.device, **key, batch=batch) for batch in batches):
                continue
            passed &= measure(run, key, batches)
    return passed


def measure(run: Run, key: dict[str, Any], batches: tuple[int, ...]) -> bool:
    """Rows of one server, a row per batch size. False if it did not start or ended."""
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "SGLANG_DFLASH": ARMS[key["arm"]]}
    try:
        with run.folder() as folder:
            published.write(key["pair"], folder, run.layers)
            graphs = ("--cuda-graph-bs-decode", *map(str, batches)) if run.real else ()
            limits = ("--max-running-requests", str(max(batches)), "--disable-radix-cache", "--context-length", "4096")
            models = published.flags(folder, BLOCK)
            with running(folder, *models, *run.flags(speculative=True), *limits, *graphs, **environment) as server:
                for batch in batches:
                    run.write(**key, batch=batch, block=BLOCK, accept=ACCEPT, **step_time(server, batch))
    except Exception as error:  # noqa: BLE001 - the other arm and the other pairs are measured all the same
        run.write(**key, error=f"{type(error).__name__}: {error}"[-3000:])
        return False
    return True


def step_time(server: Server, batch: int) -> dict[str, Any]:
    """Milliseconds of a step at a batch size: each repeat's, in order."""
    generate(server, batch, STEPS[0])  # compiles what this batch size needs
    found = []
    for _ in range(REPEATS):
        (short, few), (long, many) = (generate(server, batch, steps) for steps in STEPS)
        found.append(round(1000 * (long - short) / (many - few), 3))
    return {"step_ms": found}


def generate(server: Server, batch: int, steps: int) -> tuple[float, int]:
    """Seconds of one request with ``batch`` random prompts, and the steps that it took."""
    flush(server)
    prompts = [[random.randrange(1000, 2000) for _ in range(PROMPT)] for _ in range(batch)]
    sampling = {"temperature": 0, "max_new_tokens": steps * ACCEPT, "ignore_eos": True}
    start = time.perf_counter()
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return seconds, max(answer["meta_info"]["spec_verify_ct"] for answer in response.json())


if __name__ == "__main__":
    main("steptimes", body)
