"""What a step launches and how long the device idles, from a trace of torch's profiler."""

from __future__ import annotations

from collections import Counter
from typing import Any

HOST = ("cuda_runtime", "cuda_driver")
# Column -> beginnings of the calls that it counts.
CALLS = {
    "launches": ("cudaLaunchKernel", "cuLaunchKernel"),
    "graph_launches": ("cudaGraphLaunch", "cuGraphLaunch"),
    "copies": ("cudaMemcpyAsync", "cuMemcpy"),
}


def per_step(events: list[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return what one of ``steps`` steps launches and runs, from the events of a trace.

    ``idle`` is the device's share of time without a kernel, from the first kernel to the end of the last; the profiler
    lengthens launches and so the gaps. ``longest_ms`` has every kernel, the longest first.
    """
    host = [event for event in events if event.get("cat") in HOST]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    graphs = {each["args"]["correlation"] for each in host if each["name"].startswith(CALLS["graph_launches"])}
    outside = sum(kernel["args"]["correlation"] not in graphs for kernel in kernels)
    busy, reached, longest = 0.0, kernels[0]["ts"] if kernels else 0.0, Counter[str]()
    for kernel in kernels:
        end = kernel["ts"] + kernel["dur"]
        busy, reached = busy + max(0.0, end - max(reached, kernel["ts"])), max(reached, end)
        longest[kernel["name"][:80]] += kernel["dur"] / 1000 / steps
    return {
        **{name: sum(each["name"].startswith(calls) for each in host) / steps for name, calls in CALLS.items()},
        **{"kernels": len(kernels) / steps, "kernels_outside_graphs": outside / steps},
        "idle": 1 - busy / (reached - kernels[0]["ts"]) if kernels else None,
        "longest_ms": dict(longest.most_common()),
    }
