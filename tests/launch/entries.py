"""Programs that start SGLang by its Python API, as ``python -m tests.launch.entries NAME``; none loads plugins itself.

Each prints one :class:`Answer` as its last line.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import httpx
import psutil

from sglang_dflash_lab.bench.server import free_port
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support.prompts import corpus

PAIR = "tiny-dense"
TOKENS = 24
SAMPLING = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}


@dataclass(frozen=True)
class Answer:
    """A streamed answer.

    Attributes:
        text: of ``TOKENS`` tokens.
        steps: verify steps.
        ours: keys of this package in ``meta_info``.
        cut: tokens in each chunk of a chat with log-probabilities; empty for an engine.
    """

    text: str
    steps: int
    ours: list[str]
    cut: list[int]

    @classmethod
    def of(cls, chunks: Iterable[dict[str, Any]], cut: Iterable[int] = ()) -> Answer:
        received = list(chunks)
        ours = sorted({key for chunk in received for key in chunk["meta_info"] if "dflash" in key})
        last = received[-1]
        # SGLang's Rust server reports no steps: it sends a chunk for each
        return cls(last["text"], last["meta_info"].get("spec_verify_ct", len(received)), ours, list(cut))


def arguments(**others: Any) -> dict[str, Any]:
    pair = {"model_path": str(target_path(PAIR)), "speculative_draft_model_path": str(drafter_path(PAIR))}
    block = {"speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 16}
    return {**pair, **block, "dtype": "float32", "max_running_requests": 4, "log_level": "info", **others}


def of_engine(engine: Any) -> Answer:
    return Answer.of(engine.generate(input_ids=corpus(PAIR, 1)[0], sampling_params=SAMPLING, stream=True))


def of_server(url: str) -> Answer:
    asked = {"messages": [{"role": "user", "content": "Calculate 12 + 30."}], "model": PAIR, "logprobs": True}
    chat = _stream(f"{url}/v1/chat/completions", {**asked, "max_tokens": TOKENS, "ignore_eos": True})
    choices = [choice for chunk in chat for choice in chunk["choices"]]
    cut = [len(choice["logprobs"]["content"]) for choice in choices if choice.get("logprobs")]
    body = {"input_ids": corpus(PAIR, 1)[0], "sampling_params": SAMPLING}
    return Answer.of(_stream(f"{url}/generate", body), cut)


def _stream(url: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    with httpx.stream("POST", url, json={**body, "stream": True}, timeout=120) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def engine_of_resolved_arguments() -> Answer:
    """Of Dynamo, and of SGLang's ``benchmark.offline_throughput``; a headless scheduler makes the same calls."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    (args := ServerArgs(**arguments())).resolve_once()
    return of_engine(Engine(server_args=args))


def _attached(answers: Any) -> None:
    from sglang.srt.entrypoints.engine import Engine

    answers.put(asdict(of_engine(Engine.attach_tokenizer_worker())))


def attached_tokenizer_worker() -> Answer:
    from sglang.srt.entrypoints.engine import Engine

    Engine(**arguments(tokenizer_worker_num=2))
    spawn = multiprocessing.get_context("spawn")
    answers = spawn.Queue()
    spawn.Process(target=_attached, args=(answers,)).start()
    return Answer(**answers.get(timeout=240))


def runtime() -> Answer:
    from sglang.lang.backend.runtime_endpoint import Runtime

    return of_server(Runtime(**arguments(port=free_port())).url)


def http_server_engine_adapter() -> Answer:
    """Of verl."""
    from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter

    return of_server(HttpServerEngineAdapter(**arguments(port=free_port())).server_args.url())


def _launch(given: dict[str, Any]) -> None:
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    launch_server(ServerArgs(**given))


def spawned_child() -> Answer:
    """Of slime and AReaL."""
    given = arguments(port=free_port())
    child = multiprocessing.get_context("spawn").Process(target=_launch, args=(given,))
    child.start()
    while child.is_alive():
        try:
            if httpx.get(f"http://127.0.0.1:{given['port']}/health").status_code == 200:
                return of_server(f"http://127.0.0.1:{given['port']}")
        except httpx.TransportError:
            time.sleep(0.5)
    raise AssertionError(f"the server ended with {child.exitcode}")


def _scheduler_actor(
    server_args: Any, port_args: Any, gpu_id: int, tp_rank: int, pp_rank: int, dp_rank: Any, pipe: Any, **_: Any
) -> None:
    """What ``ray.scheduler_actor.SchedulerActor`` runs: SGLang's scheduler without ``load_plugins``."""
    from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
    from sglang.srt.runtime_context import SpawnRanks, publish, spawn_world_rank

    rank = spawn_world_rank(server_args, tp_rank=tp_rank, pp_rank=pp_rank)
    publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=rank, dp_rank=dp_rank, gpu_id=gpu_id))
    configure_scheduler_process(server_args, gpu_id)
    scheduler = Scheduler(server_args=server_args, port_args=port_args)
    pipe.send(scheduler.get_init_info())
    scheduler.run_event_loop()


def scheduler_actor() -> Answer:
    from sglang.srt.entrypoints.engine import Engine

    class OfActors(Engine):
        run_scheduler_process_func = staticmethod(_scheduler_actor)

    return of_engine(OfActors(**arguments()))


ENTRIES = (
    *(engine_of_resolved_arguments, attached_tokenizer_worker, runtime, http_server_engine_adapter),
    *(spawned_child, scheduler_actor),
)

if __name__ == "__main__":
    try:
        answer = {entry.__name__: entry for entry in ENTRIES}[sys.argv[1]]()
        print(f"\n{json.dumps(asdict(answer))}", flush=True)
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
