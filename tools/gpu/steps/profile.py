"""Torch profiler traces of decode steps, ours and SGLang's own worker's: the trace files, and the longest kernels."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.support.servers import Server, running
from tools.gpu import published
from tools.gpu.run_step import Run, main
from tools.gpu.steps.steptimes import ACCEPT, ARMS, BLOCK, generate

BATCH, STEPS, WAIT_SECONDS = 8, 10, 120
LONGEST = 12


def body(run: Run) -> bool:
    passed = True
    for pair in run.pairs or published.PAIRS[:1]:
        for arm in ARMS:
            if run.device == "cpu" and arm == "builtin":
                continue  # it needs a shim there

            def trace(pair: str = pair, arm: str = arm) -> dict[str, Any]:
                environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "SGLANG_DFLASH": ARMS[arm]}
                with run.folder() as folder:
                    published.write(pair, folder, run.layers)
                    models = (*published.flags(folder, BLOCK), "--max-running-requests", str(BATCH))
                    with running(folder, *models, *run.flags(speculative=True), **environment) as server:
                        return record(server, run.out / f"trace-{pair}-{arm}")

            passed &= run.measure({"pair": pair, "arm": arm, "layers": run.layers, "batch": BATCH}, trace)
    return passed


def record(server: Server, folder: Path) -> dict[str, Any]:
    """Profile :data:`STEPS` steps under load; the trace's name, its size and where the device's time went."""
    batch = BATCH
    generate(server, batch, 4)
    asked: dict[str, object] = {"output_dir": str(folder.absolute()), "num_steps": STEPS, "activities": ["CPU", "GPU"]}
    assert server.post("/start_profile", asked).status_code == 200
    deadline = time.monotonic() + WAIT_SECONDS
    while not (traces := sorted(folder.rglob("*.trace.json.gz"))):
        assert time.monotonic() < deadline, f"no trace in {folder} after {WAIT_SECONDS} s"
        generate(server, batch, 2 * STEPS)
    size = -1
    while size != (size := traces[0].stat().st_size):  # until it is written to its end
        time.sleep(2)
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    return {"trace": str(traces[0].relative_to(folder.parent)), "mib": round(size / 2**20, 1), **summary(events)}


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of the longest kernels, and of our stages, in a trace."""
    kernels: Counter[str] = Counter()
    stages: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "kernel":
            kernels[event["name"][:80]] += event["dur"] / 1000
        elif event.get("cat") == "user_annotation" and event["name"].startswith("dflash."):
            stages[event["name"]] += event["dur"] / 1000
    rounded = {name: round(ms, 3) for name, ms in kernels.most_common(LONGEST)}
    return {"kernels_ms": rounded, "stages_ms": {name: round(ms, 3) for name, ms in stages.items()}}


if __name__ == "__main__":
    main("profile", body)
