"""A decode step's time at published dimensions: ours beside SGLang's own worker.

Weights are random and accept lengths simulated, since a step's time depends on neither. The time is the difference of
two runs that differ only in their number of steps, so that prefill and HTTP cancel.
"""

from __future__ import annotations

import random
import time
from typing import Any

from tests.support.generation import flush
from tests.support.servers import Server
from tools.gpu import published
from tools.gpu.run_step import Run, main, told

PROMPT, STEPS, REPEATS = 128, (8, 72), 3
FEW = 16, (1, 3), 1  # where nothing is measured
PAIRS = ("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B")
# SGLang's own worker keeps a state for every draft token: 64 requests of a 27B would want 149 GiB of scratch.
BATCHES = {"ours": (1, 8, 16, 32), "builtin": (1, 8, 16)}
LIMITS = ("--disable-radix-cache", "--context-length", "4096")


def body(run: Run) -> bool:
    passed = True
    for pair, arm in published.cells(run, PAIRS):
        batches = BATCHES[arm] if run.real else (1, 2)
        graphs = ("--cuda-graph-bs-decode", *map(str, batches))
        key = {"pair": pair, "arm": arm, "layers": run.layers}
        missing = [batch for batch in batches if not run.finished(device=run.device, **key, batch=batch)]
        if not missing:
            continue
        try:
            with published.serve(run, pair, arm, max(batches), *LIMITS, *graphs) as server:
                for batch in missing:
                    shape = {"batch": batch, "block": published.BLOCK, "accept": published.ACCEPT}
                    run.write(**key, **shape, **step_time(server, batch, real=run.real))
        except Exception as error:  # noqa: BLE001 - the other arm and the other pairs are measured all the same
            run.write(**key, error=told(error))
            passed = False
    return passed


def step_time(server: Server, batch: int, *, real: bool) -> dict[str, Any]:
    """Milliseconds of a step at a batch size, of each repeat."""
    prompt, steps, repeats = (PROMPT, STEPS, REPEATS) if real else FEW
    generate(server, batch, steps[0], prompt)  # compiles what this batch size needs
    found = []
    for _ in range(repeats):
        (short, few), (long, many) = (generate(server, batch, count, prompt) for count in steps)
        found.append(round(1000 * (long - short) / max(1, many - few), 3))
    return {"step_ms": found}


def generate(server: Server, batch: int, steps: int, prompt: int = PROMPT) -> tuple[float, int]:
    """Seconds of one request with ``batch`` random prompts, and the steps that it took."""
    flush(server)
    prompts = [[random.randrange(10, 700) for _ in range(prompt)] for _ in range(batch)]
    sampling = {"temperature": 0, "max_new_tokens": steps * published.ACCEPT, "ignore_eos": True}
    start = time.perf_counter()
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return seconds, max(answer["meta_info"]["spec_verify_ct"] for answer in response.json())


if __name__ == "__main__":
    main("steptimes", body)
