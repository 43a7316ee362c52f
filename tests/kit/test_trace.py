"""What a trace of torch's profiler shows: launches and kernels per step, and the device's idle share."""

from __future__ import annotations

from typing import Any

import pytest

from tools.gpu.trace import per_step


def event(cat: str, name: str, correlation: int, ts: float = 0, dur: float = 0) -> dict[str, Any]:
    return {"cat": cat, "name": name, "ts": ts, "dur": dur, "args": {"correlation": correlation}}


# Two steps: two launches, a graph of three kernels and a copy. The device is busy from 10 to 25, 30 to 40 and 50 to 60.
TRACE = [
    {"ph": "M", "name": "process_name"},
    event("cpu_op", "cudaLaunchKernel of an operator", 0),
    event("cuda_runtime", "cudaLaunchKernel", 1),
    event("cuda_driver", "cuLaunchKernelEx", 2),
    event("cuda_runtime", "cudaGraphLaunch", 3),
    event("cuda_runtime", "cudaMemcpyAsync", 4),
    event("cuda_runtime", "cudaStreamSynchronize", 5),
    event("kernel", "last", 2, 50, 10),
    event("kernel", "first", 1, 10, 10),
    event("kernel", "in a graph", 3, 15, 10),
    event("kernel", "inside another", 3, 32, 2),
    event("kernel", "in a graph", 3, 30, 10),
    event("gpu_memcpy", "Memcpy DtoH", 4, 100, 50),
]


def test_a_step_has_its_share_of_launches_and_the_device_idles_between_kernels() -> None:
    found = per_step(TRACE, steps=2)
    assert (found["launches"], found["graph_launches"], found["copies"]) == (1, 0.5, 0.5)
    assert (found["kernels"], found["kernels_outside_graphs"]) == (2.5, 1)
    assert found["idle"] == pytest.approx(0.3)
    assert next(iter(found["longest_ms"].items())) == ("in a graph", 0.01)
    assert per_step(TRACE[:2], steps=1)["idle"] is None
