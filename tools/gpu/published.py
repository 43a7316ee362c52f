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
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from tests.support.cards import FOLDER, shrink_drafter, shrink_target
from tests.support.cards import card as published_card
from tests.support.generation import assert_nothing_leaked, flush
from tests.support.pair_servers import worker_info
from tests.support.servers import Server, running
from tools.gpu.run import Run, memory_used

BLOCK, ACCEPT = 16, 4
ARMS = {"ours": "", "builtin": "builtin"}  # -> SGLANG_DFLASH
DUMMY = (
    *("--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "bfloat16", "--speculative-algorithm", "DFLASH"),
    *("--speculative-draft-load-format", "dummy", "--speculative-num-draft-tokens", str(BLOCK)),
)


@contextlib.contextmanager
def serve(run: Run, pair: str, arm: str, *flags: str) -> Iterator[Server]:
    environment = {"SGLANG_SIMULATE_ACC_LEN": str(ACCEPT), "SGLANG_DFLASH": ARMS[arm]}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_configs(pair, folder, shrunk=not run.real)
        models = ("--model-path", str(folder / "target"), "--speculative-draft-model-path", str(folder / "drafter"))
        with running(run.out, *models, *DUMMY, *flags, *run.flags(speculative=True), **environment) as server:
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


def generate(server: Server, batch: int, steps: int, prompt: int) -> tuple[float, int]:
    """Return seconds of one request with ``batch`` random prompts, and the number of steps that it took."""
    flush(server)
    prompts = [[random.randrange(10, 700) for _ in range(prompt)] for _ in range(batch)]
    sampling = {"temperature": 0, "max_new_tokens": steps * ACCEPT, "ignore_eos": True}
    start = time.perf_counter()
    response = server.post("/generate", {"input_ids": prompts, "sampling_params": sampling})
    seconds = time.perf_counter() - start
    assert response.status_code == 200, response.text
    return seconds, max(answer["meta_info"]["spec_verify_ct"] for answer in response.json())


# Flags of a card that a run of random weights on one GPU with Triton attention cannot take.
LEFT_OUT = {
    *("--model-path", "--speculative-draft-model-path", "--attention-backend", "--speculative-draft-attention-backend"),
    *("--linear-attn-prefill-backend", "--linear-attn-decode-backend", "--host", "--port", "--tp-size"),
    *("--speculative-algorithm", "--speculative-num-draft-tokens", "--speculative-dflash-block-size"),
}


def card(run: Run) -> bool:
    """Start a card's command at its dimensions; compare the memory table with the device; take 200 steps."""
    return run.measure_each(({"pair": pair}, partial(_start, run, pair)) for pair in run.pairs or ("Qwen3.6-27B",))


def _start(run: Run, pair: str) -> dict[str, Any]:
    words, flags = published_card(pair).arguments, ["--speculative-adaptive"]
    for index in (index for index, word in enumerate(words) if word.startswith("--")):
        value = words[index + 1 : index + 2]
        if words[index] not in LEFT_OUT:
            flags += [words[index], *(word for word in value if not word.startswith("--"))]
    before, began = memory_used(), time.monotonic()
    with serve(run, pair, "ours", *flags) as server:
        start_seconds, parts, after = time.monotonic() - began, worker_info(server)["memory_bytes"], memory_used()
        lines = [line for line in server.log.splitlines() if "DFLASH" in line or "requests at once" in line]
        seconds, steps = generate(server, *((8, 200, 128) if run.real else (1, 4, 16)))
        info = worker_info(server)
        assert_nothing_leaked(server)
    mib = {part: size >> 20 for part, size in parts.items()}
    return {
        **{"start_seconds": round(start_seconds, 1), "allocated_mib": mib, "sum_mib": sum(parts.values()) >> 20},
        **{"device_mib": after - before >> 20, "steps": steps, "step_ms": round(1000 * seconds / steps, 2)},
        **{"states": info["states"], "widths": info["steps_by_width"], "accept": info["mean_accept_length"]},
        "log": lines[:40],
    }


# SGLang's own worker keeps a state per draft token: a 27B would need 149 GiB for batch 32.
BATCHES = {"ours": [1, 8, 16, 32], "builtin": [1, 8, 16]}


def steptimes(run: Run) -> bool:
    """Measure a decode step's time, ours and SGLang's own worker's."""
    pairs = run.pairs or ("Qwen3.6-27B", "Qwen3.6-35B-A3B", "Qwen3.5-4B")
    return run.measure_each(
        ({"pair": pair, "arm": arm, "batches": batches}, partial(_step_times, run, pair, arm, batches))
        for pair in pairs
        for arm, batches in (BATCHES if run.real else {"ours": [1, 2]}).items()
    )


def _step_times(run: Run, pair: str, arm: str, batches: list[int]) -> dict[str, Any]:
    prompt, few, many, repeats = (128, 8, 72, 3) if run.real else (16, 1, 3, 1)

    def step_time(server: Server, batch: int) -> dict[str, Any]:
        generate(server, batch, few, prompt)  # compiles what this batch size needs
        found = []
        for _ in range(repeats):
            (short, less), (long, more) = (generate(server, batch, steps, prompt) for steps in (few, many))
            found.append(round(1000 * (long - short) / max(1, more - less), 3))
        return {"step_ms": found}

    limits = ("--disable-radix-cache", "--context-length", "4096", "--max-running-requests", str(max(batches)))
    with serve(run, pair, arm, *limits, "--cuda-graph-bs-decode", *map(str, batches)) as server:
        cells = ((batch, {"pair": pair, "arm": arm, "batch": batch}) for batch in batches)
        assert run.measure_each((key, partial(step_time, server, batch)) for batch, key in cells), "a batch size failed"
    return {}


def profile(run: Run) -> bool | None:
    """Write torch profiler traces of decode steps, ours and SGLang's own worker's."""
    cells = [(pair, arm) for pair in run.pairs or ("Qwen3.5-4B",) for arm in ARMS]
    rows = (({"pair": pair, "arm": arm}, partial(_trace, run, pair, arm)) for pair, arm in cells)
    return run.measure_each(rows) if run.real else None


def _trace(run: Run, pair: str, arm: str) -> dict[str, Any]:
    """Profile ten steps under load. Return the trace's file and milliseconds of the longest kernels and our stages."""
    folder, batch = run.out / f"trace-{pair}-{arm}", 8
    options: dict[str, object] = {"output_dir": str(folder), "activities": ["CPU", "GPU"], "num_steps": 10}
    options |= {"with_stack": False, "record_shapes": False}  # most of a trace, and unused here
    with serve(run, pair, arm, "--max-running-requests", str(batch)) as server:
        generate(server, batch, 2, 16)
        assert server.post("/start_profile", options).status_code == 200
        generate(server, batch, 20, 16)
        deadline, size = time.monotonic() + 120, -1
        while not (traces := sorted(folder.rglob("*.trace.json.gz"))) or size != traces[0].stat().st_size:
            assert time.monotonic() < deadline, f"no complete trace in {folder} after 120 s"
            size = traces[0].stat().st_size if traces else -1  # the same twice: complete
            time.sleep(2)
    kernels, stages = Counter[str](), Counter[str]()
    for event in json.loads(gzip.decompress(traces[0].read_bytes()))["traceEvents"]:
        if event.get("cat") == "kernel":
            kernels[event["name"][:80]] += event["dur"] / 1000
        elif event.get("cat") == "user_annotation" and event["name"].startswith("dflash."):
            stages[event["name"]] += event["dur"] / 1000
    trace = str(traces[0].relative_to(run.out))
    return {"trace": trace, "kernels_ms": dict(kernels.most_common(12)), "stages_ms": stages}
