"""Steps with servers of the published dimensions: random weights, simulated accept lengths.

A step's time depends on neither weights nor tokens. It is the difference of two runs that differ only in their number
of steps, so that prefill and HTTP cancel.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cards import FOLDER, shrink_drafter, shrink_target
from tests.support.cards import card as published_card
from tests.support.generation import assert_nothing_leaked, flush
from tests.support.servers import Server, running, worker_info
from tools.gpu.run import BUILTIN, Arm, Run, device_memory
from tools.gpu.trace import per_step

BLOCK, ACCEPT = 16, 4
# SGLang's own worker keeps a state per draft token: 7 requests of a 27B fit 141 GB.
BATCHES = defaultdict(lambda: (1, 4), {"Qwen3.5-4B": (1, 8, 16)})
ARMS = {"ours": Arm(), "builtin": BUILTIN}
DUMMY = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--speculative-algorithm", "DFLASH"),
    *("--speculative-draft-load-format", "dummy", "--speculative-num-draft-tokens", str(BLOCK)),
)


@contextlib.contextmanager
def serve(run: Run, pair: str, name: str, *flags: str) -> Iterator[Server]:
    arm = run.fit(ARMS[name])
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), **dict(arm.environment)}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_configs(pair, folder, shrunk=not run.real)
        models = ("--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "drafter"))
        command = (*models, *DUMMY, *arm.flags, *flags, *run.flags(speculative=True))
        with running(run.out, *command, **environment) as server:
            yield server


def write_configs(pair: str, folder: Path, *, shrunk: bool) -> None:
    """Write a ``config.json`` each to ``folder/target`` and ``folder/drafter``.

    Args:
        shrunk: keep the structure only, at sizes that an interpreter can run.
    """
    target, drafter = (
        json.loads((FOLDER / pair / model / "config.json").read_text()) for model in ("target", "drafter")
    )
    if shrunk:
        target, drafter = shrink_target(target), shrink_drafter(drafter, target.get("text_config", target))
    if text := target.get("text_config"):  # the wheelhouse lacks the vision part's image processor
        names = [name.replace("ForConditionalGeneration", "ForCausalLM") for name in target["architectures"]]
        tied = target.get("tie_word_embeddings", False)
        target = {**text, "architectures": names, "tie_word_embeddings": tied}
    for model, config in (("target", target), ("drafter", drafter)):
        (folder / model).mkdir()
        (folder / model / "config.json").write_text(json.dumps(config))


def pairs(run: Run) -> tuple[str, ...]:
    """Return the requested pairs, else those that fit: 27B targets need 100 GiB."""
    fit = ("Qwen3.5-4B", "Qwen3.5-27B") if device_memory("total") > 100 << 30 else ("Qwen3.5-4B",)
    return run.pairs or fit


def generate(server: Server, batch: int, steps: int, prompt: int) -> tuple[float, int]:
    """Return seconds of one request with ``batch`` random prompts, and the number of steps that it took.

    Raises:
        AssertionError: the server does not run ``batch`` requests at once.
    """
    [state] = server.get("/server_info").json()["internal_states"]
    running = state["effective_max_running_requests_per_dp"]
    assert running >= batch, f"the server runs {running} requests at once, not {batch}"
    flush(server)
    prompts = [[random.randrange(10, 700) for _ in range(prompt)] for _ in range(batch)]
    sampling = {"temperature": 0, "max_new_tokens": steps * ACCEPT, "ignore_eos": True}
    start = time.perf_counter()
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return seconds, max(answer["meta_info"]["spec_verify_ct"] for answer in response.json())


def step_time(run: Run, server: Server, batch: int) -> dict[str, Any]:
    """Return milliseconds of a step with ``batch`` requests, measured several times."""
    prompt, few, many, repeats = (128, 8, 72, 3) if run.real else (4, 1, 3, 1)
    generate(server, batch, few, prompt)  # compiles what this batch size needs
    found = []
    for _ in range(repeats):
        (short, less), (long, more) = (generate(server, batch, steps, prompt) for steps in (few, many))
        found.append(round(1000 * (long - short) / (more - less), 3))
    return {"step_ms": found}


# Flags of a card that a run of random weights on one GPU with Triton attention cannot take.
LEFT_OUT = {
    *("--model-path", "--speculative-draft-model-path", "--attention-backend", "--speculative-draft-attention-backend"),
    *("--linear-attn-prefill-backend", "--linear-attn-decode-backend", "--host", "--port", "--tp-size"),
    *("--speculative-algorithm", "--speculative-num-draft-tokens", "--speculative-dflash-block-size"),
}


def card(run: Run) -> bool:
    """Start a card's command at its dimensions; compare the memory table with the device; time its steps."""
    return run.measure_each(({"pair": pair}, partial(_start, run, pair)) for pair in pairs(run))


def _start(run: Run, pair: str) -> dict[str, Any]:
    words, flags = published_card(pair).arguments, ["--speculative-adaptive"]
    for index in (index for index, word in enumerate(words) if word.startswith("--")):
        value = words[index + 1 : index + 2]
        if words[index] not in LEFT_OUT:
            flags += [words[index], *(word for word in value if not word.startswith("--"))]
    before, began = device_memory("used"), time.monotonic()
    with serve(run, pair, "ours", *flags) as server:
        start_seconds, parts = time.monotonic() - began, worker_info(server)["memory_bytes"]
        after = device_memory("used")
        lines = [line for line in server.log.splitlines() if "DFLASH" in line or "requests at once" in line]
        measured = step_time(run, server, 8 if run.real else 1)
        info = worker_info(server)
        assert_nothing_leaked(server)
    mib = {part: size >> 20 for part, size in parts.items()}
    return {
        **{"start_seconds": round(start_seconds, 1), "allocated_mib": mib, "sum_mib": sum(parts.values()) >> 20},
        **{"device_mib": after - before >> 20, **measured, "log": lines[:40]},
        **{"states": info["states"], "widths": info["steps_by_width"], "accept": info["mean_accept_length"]},
    }


def steptimes(run: Run) -> bool:
    """Measure a decode step, ours and SGLang's own worker's: its time, its launches and the device's idle share."""
    cells = [(pair, arm) for pair in pairs(run) for arm in run.chosen(ARMS)]
    return run.measure_each(({"pair": pair, "arm": arm}, partial(_steps, run, pair, arm)) for pair, arm in cells)


def _steps(run: Run, pair: str, arm: str) -> dict[str, Any]:
    batches = BATCHES[pair] if run.real else (1,)
    limits = ("--disable-radix-cache", "--context-length", "4096", "--max-running-requests", str(max(batches)))
    with serve(run, pair, arm, *limits, "--cuda-graph-bs-decode", *map(str, batches)) as server:
        assert measure_steps(run, server, pair, arm, batches), "a measurement failed"
    return {"batches": batches}


def measure_steps(run: Run, server: Server, pair: str, arm: str, batches: tuple[int, ...]) -> bool:
    """Measure the step times of each batch size, then profile one request. Return False if one failed.

    A profile that fails on a CPU is recorded and no failure: torch's profiler often crashes a server there.
    """
    key = {"pair": pair, "arm": arm}
    times = (({**key, "batch": batch}, partial(step_time, run, server, batch)) for batch in batches)
    passed = run.measure_each(times)
    profiled = run.measure({**key, "tool": "profiler"}, partial(_profiled, run, server, f"trace-{pair}-{arm}"))
    return passed and (profiled or not run.real)


def _profiled(run: Run, server: Server, name: str) -> dict[str, Any]:
    """Profile the decode steps of one request. Return the trace's file and what it contains, per step."""
    folder = run.out / name
    activities, steps = (["CPU", "GPU"], 10) if run.real else (["CPU"], 1)
    options = {"output_dir": str(folder), "activities": activities, "num_steps": steps, "profile_by_stage": True}
    options |= {"with_stack": False, "record_shapes": False}  # most of a trace, and unused here
    assert server.post("/start_profile", options).status_code == 200
    generate(server, 1, 2 * steps, 4)
    deadline, size = time.monotonic() + 60, -1
    while not (traces := sorted(folder.rglob("*DECODE*.gz"))) or size != traces[-1].stat().st_size:
        assert time.monotonic() < deadline, f"no complete trace in {folder} after 60 s"
        size = traces[-1].stat().st_size if traces else -1  # the same twice: complete
        time.sleep(2)
    events = json.loads(gzip.decompress(traces[-1].read_bytes()))["traceEvents"]
    return {"trace": str(traces[-1].relative_to(run.out)), **per_step(events, steps)}
