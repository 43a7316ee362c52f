"""A card's command with a 27B's dimensions and random weights: the start, the memory table beside the device, steps."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from tests.support.cards import card
from tests.support.generation import assert_nothing_leaked
from tests.support.pair_servers import worker_info
from tests.support.servers import Server
from tools.gpu import published
from tools.gpu.device import used
from tools.gpu.run_step import Run, main
from tools.gpu.steps.steptimes import generate
from tools.gpu.unpack import ROOT

PAIR = "Qwen3.6-27B"
STEPS, BATCH = 200, 8
TWO_WIDTHS = ROOT / "tests/fixtures/widths/two.json"
# The card's own flags, but for its models, its backends, its address, and the width of its machine.
LEFT_OUT = {
    *("--model-path", "--speculative-draft-model-path", "--attention-backend", "--speculative-draft-attention-backend"),
    *("--linear-attn-prefill-backend", "--linear-attn-decode-backend", "--host", "--port", "--tp-size"),
    *("--speculative-algorithm", "--speculative-num-draft-tokens", "--speculative-dflash-block-size"),
}


def body(run: Run) -> bool:
    pairs = run.pairs or (PAIR,)
    return run.measure_each(({"pair": pair, "layers": run.layers}, partial(start, run, pair)) for pair in pairs)


def start(run: Run, pair: str) -> dict[str, Any]:
    before, began = used(), time.monotonic()
    # Without a device calibration interprets each width's full batch.
    requests, widths = (None, ()) if run.real else (1, ("--speculative-adaptive-config", str(TWO_WIDTHS)))
    flags = (*flags_of(pair), "--speculative-adaptive", *widths)
    with published.serve(run, pair, "ours", requests, *flags) as server:
        started, parts, after = time.monotonic() - began, worker_info(server)["memory_bytes"], used()
        row = {"start_seconds": round(started, 1), "memory_bytes": parts, "sum": sum(parts.values())}
        return {**row, "taken": after - before if before else None, "log": told(server), **steps(run, server)}


def flags_of(pair: str) -> list[str]:
    """The card's flags that a run of random weights and Triton attention can take."""
    words, kept = iter(card(pair).arguments), list[str]()
    groups: list[list[str]] = []
    for word in words:
        groups.append([word]) if word.startswith("--") else groups[-1].append(word)
    for group in groups:
        kept += [] if group[0] in LEFT_OUT else group
    return kept


def told(server: Server) -> list[str]:
    """What our worker logs at its start: who serves, the memory table's totals, graphs and widths."""
    lines = (line for line in server.log.splitlines() if "DFLASH" in line or "requests at once" in line)
    return [line.partition("] ")[2] or line for line in lines][:40]


def steps(run: Run, server: Server) -> dict[str, Any]:
    seconds, count = generate(server, *((BATCH, STEPS) if run.real else (1, 4, 16)))
    info = worker_info(server)
    assert_nothing_leaked(server)
    found = {"states": info["states"], "widths": info["steps_by_width"], "accept": info["mean_accept_length"]}
    return {"steps": count, "step_ms": round(1000 * seconds / count, 2), **found}


if __name__ == "__main__":
    main("card", body)
