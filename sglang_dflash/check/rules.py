"""Findings on expected memory, of which all but the weights are estimates."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from sglang_dflash.check.advice import HIGHEST_FRACTION
from sglang_dflash.check.memory import Headroom, MemoryTable
from sglang_dflash.errors import DFlashError, Doubt, Finding, judge
from sglang_dflash.plan.division import FLOOR, size

RUNNING = "running requests"


def check_memory(memory: MemoryTable) -> Iterator[Finding]:
    if memory.static_bytes and memory.weighed:
        yield judge("weights", _weights, memory)
    yield replace(judge(RUNNING, _running, memory), estimated=True)
    if memory.headroom is not None:
        finding = judge("memory outside the static fraction", _headroom, memory, memory.headroom)
        yield replace(finding, estimated=True)


def _weights(memory: MemoryTable) -> str:
    weights, static, fraction = memory.served.sizing.weights, memory.static_bytes, memory.fraction
    if weights < static:
        return f"{size(weights)} of {size(static)}"
    wider = f"--mem-fraction-static {HIGHEST_FRACTION}, " if weights * fraction < static * HIGHEST_FRACTION else ""
    raise DFlashError(
        f"the weights of one rank take {size(weights)}, and static memory is {size(static)} ({fraction} of the device)",
        expected="static memory that holds the weights and leaves room for K/V",
        remedy=f"set {wider}a larger --tp-size, or serve a quantised target (FP8)",
    )


def _running(memory: MemoryTable) -> str:
    served, wanted = memory.served, memory.served.sizing.max_running
    if memory.static_bytes == 0:
        return "no GPU here; use --gpu or --memory-gib to check another machine"
    if served.running >= wanted:
        return f"{wanted} at once, with {served.tokens:,} tokens of K/V in total"
    if served.running == 0:
        raise DFlashError(
            f"weights and one request need more than the {size(memory.static_bytes)} of static memory",
            expected=f"more than {size(served.sizing.weights)}",
            remedy="use more GPUs (--tp-size), a larger --mem-fraction-static or a quantised target",
        )
    raise Doubt(
        f"{served.running} of {wanted} requests (--max-running-requests) fit at once, with {served.tokens:,} tokens of "
        f"K/V in total; the limit: {served.capped_by}",
        expected=f"memory for {wanted} requests; limited by {served.capped_by}",
        remedy="use more or larger GPUs, or accept the smaller number; `sglang-dflash check` names flags that help",
    )


def _headroom(memory: MemoryTable, headroom: Headroom) -> str:
    taken = headroom.sampling + headroom.buffers + headroom.staged
    sets = "1 set" if headroom.sets == 1 else f"{headroom.sets} sets"
    needs = f"sampling {size(headroom.sampling)}, attention buffers of {sets} of graphs {size(headroom.buffers)}"
    if headroom.left >= FLOOR:
        return f"{needs}; {size(headroom.left)} left for activations and graphs"
    whole = memory.static_bytes + taken + headroom.left
    lower = math.floor(100 * (whole - taken - FLOOR) / whole) / 100
    fewer = "fewer requests or a shorter --context-length"
    raise Doubt(
        f"{needs}; {size(max(0, headroom.left)) or 'nothing'} left for activations and graphs",
        expected=f"{size(FLOOR)} or more",
        remedy=f"set --mem-fraction-static {lower:.2f}, {fewer}" if lower > 0 else f"set {fewer}",
    )
