"""Torch profiler traces of decode steps, ours and SGLang's own worker's, and their longest kernels."""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from functools import partial
from typing import Any

from tools.gpu import published
from tools.gpu.run_step import Run, main
from tools.gpu.steps.steptimes import generate

BATCH, STEPS, SECONDS, LONGEST = 8, 10, 120, 12


def body(run: Run) -> bool:
    return run.measure_each(
        ({"pair": pair, "arm": arm, "layers": run.layers, "batch": BATCH}, partial(trace, run, pair, arm))
        for pair, arm in published.cells(run, published.PAIRS[:1])
    )


def trace(run: Run, pair: str, arm: str) -> dict[str, Any]:
    """Profile some steps under load; the trace's file, its size and where the device's time went."""
    folder = run.out.absolute() / f"trace-{pair}-{arm}"
    batch = BATCH if run.real else 1
    with published.serve(run, pair, arm, batch) as server:
        generate(server, batch, 2, 16)
        # Without a driver torch's CUDA tracer raises, and is caught, at every operator.
        activities = ["CPU", "GPU"] if run.real else ["CPU"]
        asked: dict[str, object] = {"output_dir": str(folder), "activities": activities}
        # An interpreted step is millions of operators, each an event: there the trace ends before the first step.
        asked |= {"num_steps": STEPS} if run.real else {}
        asked |= {"with_stack": False, "record_shapes": False}  # nobody reads them here, and they are most of a trace
        assert server.post("/start_profile", asked).status_code == 200
        if not run.real:
            assert server.post("/stop_profile", {}).status_code == 200
        deadline = time.monotonic() + SECONDS
        while not (traces := sorted(folder.rglob("*.trace.json.gz"))):
            assert time.monotonic() < deadline, f"no trace in {folder} after {SECONDS} s"
            if run.real:
                generate(server, batch, 2 * STEPS, 16)
            else:
                time.sleep(1)
        size = -1
        while size != (size := traces[0].stat().st_size):  # until it is complete
            time.sleep(2)
    events = json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]
    return {"trace": str(traces[0].relative_to(folder.parent)), "mib": round(size / 2**20, 1), **summary(events)}


def summary(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Milliseconds of the longest kernels and of our stages in a trace."""
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
