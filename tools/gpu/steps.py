"""Servers of published dimensions: random weights, simulated accept lengths; step times, host times, a profile.

A step's time depends on neither weights nor tokens. It is the difference of two runs that differ only in their number
of steps, so that prefill and HTTP cancel.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sglang_dflash.launch.settings import ONE_FORWARD_SWITCH
from tests.support.cards import write_text_configs
from tests.support.generation import flush
from tests.support.servers import Server, running
from tools.gpu.call import Job
from tools.gpu.plugin import HOST, STAGES
from tools.gpu.rows import BUILTIN, FA3, OURS, PLAIN
from tools.gpu.trace import per_step

PAIR, BLOCK, ACCEPT, ADAPTIVE, ONE_FORWARD = "Qwen3.5-4B", 16, 4, "adaptive", "one forward"
# Arm -> GiB on the device, environment. States of 32 requests that SGLang's worker stores take 28 GiB.
ARMS: dict[str, tuple[float, dict[str, str]]] = {
    OURS: (22.0, {}),
    ONE_FORWARD: (22.0, {ONE_FORWARD_SWITCH: "1"}),
    BUILTIN: (50.0, {"SGLANG_DFLASH": "builtin"}),
    PLAIN: (19.0, {}),
    # with one token for all, every request would be copied from itself
    ADAPTIVE: (24.0, {"SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token"}),
}
WIDTHS = {f"width {width}": width for width in (4, 8)}  # fixed ones beside the block, for the adaptive one
ARMS |= dict.fromkeys(WIDTHS, ARMS[OURS])
ARMS |= {f"{FA3}{arm}": ARMS[arm] for arm in (OURS, BUILTIN, PLAIN)}
PROFILED = (OURS, ONE_FORWARD, BUILTIN, PLAIN)
FLAGS = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--disable-radix-cache"),
    *("--context-length", "4096", "--disable-prefill-cuda-graph"),
)
DRAFTED = ("--speculative-algorithm", "DFLASH", "--speculative-draft-load-format", "dummy")


class Sizes(NamedTuple):
    """What is measured on a device; :data:`SMALL` is the least that shows that it works."""

    batches: tuple[int, ...] = (1, 8, 16, 32)
    profiled: tuple[int, ...] = (1, 8, 16)
    prompt: int = 128
    few: int = 8
    many: int = 56
    repeats: int = 2


SMALL = Sizes((1,), (), 4, 1, 3, 1)  # torch's profiler often ends a server on a CPU


def jobs(arms: tuple[str, ...]) -> list[Job]:
    return [
        Job(f"{PAIR} {arm}", ARMS[arm][0], measure, "steps", {"pair": PAIR, "arm": arm}, alone=arm == ADAPTIVE)
        for arm in arms
    ]


def measure(job: Job) -> None:
    """Start; then, alone, measure each batch size, host times and profiles. Of an adaptive width its costs too."""
    sizes, arm, began = Sizes() if job.call.real else SMALL, job.key["arm"], time.monotonic()
    with serve(job, arm, sizes) as server:
        found = state(server)
        info, graphs = found.get("sglang_dflash") or {}, found["memory_usage"]["graph"]
        job.row("start", seconds=round(time.monotonic() - began, 1), graphs_gb=graphs, parts=info.get("start_seconds"))
        if arm == ADAPTIVE:
            costs = info["width"]["costs"]
            for batch, row in zip(costs["batch_sizes"], costs["milliseconds"], strict=True):
                by_width = dict(zip(map(str, costs["widths"]), row, strict=True))
                job.row("costs", batch=batch, milliseconds=by_width, calibration_s=info["start_seconds"]["calibration"])
        job.wait_for_turn()
        for batch in sizes.batches:
            for what in ("steps", "tokens") if arm in (OURS, ADAPTIVE, *WIDTHS) else ("steps",):
                job.measure(what, partial(MEASURES[what], server, arm, batch, sizes), batch=batch)
        for row in host_times(server.log):
            stages = {name: row.pop(name) for name in [*row] if name.removesuffix("_ms") in STAGES}
            job.row("host", **row)
            job.row("stages", batch=row["batch"], **stages)
        for batch in sizes.profiled if arm.removeprefix(FA3) in PROFILED else ():
            job.measure("profile", partial(profiled, job.folder, server, arm, batch), batch=batch)


@contextlib.contextmanager
def serve(job: Job, arm: str, sizes: Sizes) -> Iterator[Server]:
    models = job.folder / "models"
    write_text_configs(PAIR, models, shrunk=not job.call.real)
    flags = [*FLAGS, "--model-path", str(models / "target"), "--max-running-requests", str(max(sizes.batches))]
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "GPU_KIT_HOST": "1", **ARMS[arm][1], **job.slice}
    fa3, arm = arm.startswith(FA3), arm.removeprefix(FA3)
    if arm != PLAIN:
        flags += [*DRAFTED, "--speculative-draft-model-path", str(models / "drafter")]
        flags += ["--speculative-num-draft-tokens", str(WIDTHS.get(arm, BLOCK))]
    if arm == BUILTIN and job.call.real and not fa3:  # FlashInfer is not packed
        flags += ["--speculative-draft-attention-backend", "triton"]
    flags += ["--mem-fraction-static", "0.85", "--sampling-backend", "pytorch"] if job.call.real else []
    flags += ["--attention-backend", "fa3" if fa3 else "triton"] if job.call.real else []
    flags += ["--cuda-graph-bs-decode", *map(str, sizes.batches)]
    flags += ["--speculative-adaptive"] if arm == ADAPTIVE else []
    if arm == BUILTIN and not job.call.real:  # it runs in the rehearsal, with a narrow block
        from tests.rehearsal.run import rehearsed

        flags += ["--speculative-num-draft-tokens", "4"]
        environment |= {**rehearsed(), "REHEARSE_BUILTIN": "1"}
    with running(job.folder, *flags, **environment) as server:
        yield server


def state(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]
    return found


def generate(server: Server, arm: str, batch: int, steps: int, prompt: int) -> tuple[float, int]:
    """Return seconds of one request with ``batch`` random prompts, and the number of steps that it took."""
    flush(server)
    prompts = [[random.randrange(10, 700) for _ in range(prompt)] for _ in range(batch)]
    tokens = steps if arm.endswith(PLAIN) else steps * ACCEPT
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return seconds, max(answer["meta_info"].get("spec_verify_ct") or tokens for answer in response.json())


def step_times(server: Server, arm: str, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Return milliseconds of a step with ``batch`` requests, measured several times."""
    info = state(server)
    most = info["effective_max_running_requests_per_dp"]
    assert most >= batch, f"the server runs {most} requests at once, not {batch}"
    generate(server, arm, batch, sizes.few, sizes.prompt)  # compiles what this batch size needs
    found = []
    for _ in range(sizes.repeats):
        counts = (sizes.few, sizes.many)
        (short, less), (long, more) = (generate(server, arm, batch, steps, sizes.prompt) for steps in counts)
        found.append(round(1000 * (long - short) / (more - less), 3))
    return {"step_ms": found}


def throughput(server: Server, arm: str, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Return tokens per second of ``batch`` requests, at the widths that the server chooses."""
    found = []
    for _ in range(sizes.repeats):
        (short, _), (long, _) = (generate(server, arm, batch, n, sizes.prompt) for n in (sizes.few, 2 * sizes.many))
        found.append(round(batch * ACCEPT * (2 * sizes.many - sizes.few) / (long - short), 1))
    return {"tokens_s": found}


MEASURES = {"steps": step_times, "tokens": throughput}


def host_times(log: str) -> list[dict[str, Any]]:
    """Return for each batch size the line of the shortest loops."""
    lines = [json.loads(line.partition(HOST)[2]) for line in log.splitlines() if HOST in line]
    shortest = {row["batch"]: row for row in sorted(lines, key=lambda row: -row["loop_ms"])}
    return [shortest[batch] for batch in sorted(shortest)]


def profiled(folder: Path, server: Server, arm: str, batch: int) -> dict[str, Any]:
    """Profile ten decode steps; the trace stays in ``folder``."""
    options = {"output_dir": str(folder), "activities": ["CPU", "GPU"], "num_steps": 10, "profile_by_stage": True}
    options |= {"with_stack": False, "record_shapes": False}  # most of a trace, and unused here
    assert server.post("/start_profile", options).status_code == 200
    generate(server, arm, batch, 20, 4)
    deadline, size = time.monotonic() + 15, -1
    while not (traces := sorted(folder.rglob("*DECODE*.gz"))) or size != traces[-1].stat().st_size:
        assert time.monotonic() < deadline, f"no complete trace in {folder} after 15 s"
        size = traces[-1].stat().st_size if traces else -1  # the same twice: complete
        time.sleep(0.7)
    return per_step(json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"], 10)
