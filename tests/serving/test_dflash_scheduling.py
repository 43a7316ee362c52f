"""Requests that come, go and end at awkward moments give their slots back; a process that dies."""

from __future__ import annotations

import contextlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest

from sglang_dflash_lab.pairs import target_path
from sglang_dflash_lab.train.hf import load_model
from tests.support.checkpoints import assert_greedy
from tests.support.generation import assert_nothing_leaked, generate, generate_all
from tests.support.prompts import corpus
from tests.support.servers import ONE_WIDTH, Server, changed_drafter, dflash_server, strict, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-dense"
CONTEXT = 512
WHOLE = {"ignore_eos": True}
DEAD_WITHIN = 60.0  # seconds


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that copies, whose drafter was trained for a shorter context."""
    arguments = (*ONE_WIDTH, "--context-length", str(CONTEXT), "--max-total-tokens", "4096")
    folder = tmp_path_factory.mktemp("server")
    drafter = changed_drafter(PAIR, folder, max_position_embeddings=64)
    environment = {**strict(), **with_plugin(folder, "history")}
    with dflash_server(PAIR, folder, *arguments, drafter=drafter, **environment) as server:
        yield server


def short(number: int, seed: int = 0) -> list[list[int]]:
    return corpus(PAIR, number, seed, shape="single")


def test_answers_reach_the_end_of_the_targets_context(server: Server) -> None:
    prompts = [prompt * 20 for prompt in short(4, seed=6)]  # the last is as long as SGLang takes
    prompts = [prompt[: CONTEXT - 34 + 9 * i] for i, prompt in enumerate(prompts)]
    answers = generate_all(server, prompts, 4, sampling_params={"ignore_eos": True, "max_new_tokens": None})
    target = load_model(target_path(PAIR))
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_greedy(target, prompt, answer.tokens)
        assert answer.meta["finish_reason"]["type"] == "length"
        assert answer.meta["prompt_tokens"] + answer.meta["completion_tokens"] == CONTEXT - 2  # all that SGLang allows


def test_sampled_requests_make_no_step_wait(server: Server) -> None:
    """The server refuses host waits: here in SGLang's sampler too, with every filter and no seed."""
    filters = {"temperature": 1.1, "top_k": 20, "top_p": 0.9, "min_p": 0.05, "ignore_eos": True}
    answers = generate_all(server, short(4, seed=11), 4, 24, sampling_params=filters)
    assert [len(answer.tokens) for answer in answers] == [24] * 4


def test_counters_reach_server_info_and_prometheus(server: Server) -> None:
    before = worker_info(server)
    answer = generate(server, short(1, seed=10)[0], 48, sampling_params=WHOLE)
    after = worker_info(server)
    steps = after["steps_by_width"]["16"] - before["steps_by_width"].get("16", 0)
    # With overlap one more step may have been launched before the host saw the request's end.
    assert answer.meta["spec_verify_ct"] <= steps <= answer.meta["spec_verify_ct"] + 1
    metrics = server.get("/metrics").text
    assert re.search(r'^sglang_dflash:steps_total\{.*width="16"', metrics, re.MULTILINE)
    (counted,) = re.findall(r"^sglang_dflash:accept_length_count\{.*\} (\S+)$", metrics, re.MULTILINE)
    assert float(counted) == sum(after["blocks_by_accept_length"].values())


def test_a_dead_scheduler_ends_its_requests_and_the_servers_health(server: Server) -> None:
    """The last test of this server."""
    assert_nothing_leaked(server)
    assert_death_is_noticed(server, lambda: kill(server, "sglang::scheduler"))


@pytest.mark.slow
def test_a_dead_rank_of_two_ends_its_requests_and_the_servers_health(tmp_path: Path) -> None:
    with dflash_server(PAIR, tmp_path, "--tp-size", "2") as server:
        assert_death_is_noticed(server, lambda: kill(server, "scheduler_TP1"))


def kill(server: Server, name: str) -> None:
    next(p for p in server.family() if name in " ".join(p.cmdline())).send_signal(signal.SIGKILL)


def assert_death_is_noticed(server: Server, kill: Callable[[], None]) -> None:
    """Kill a process of the server under load: every request ends, and the server reports bad health."""
    assert server.get("/health").status_code == 200
    pool = ThreadPoolExecutor(8)
    running = [pool.submit(generate, server, prompt, 400, sampling_params=WHOLE) for prompt in short(8, seed=12)]
    time.sleep(0.3)
    kill()
    assert not wait(running, DEAD_WITHIN).not_done, "a request still waits"
    with contextlib.suppress(httpx.TransportError):
        assert server.get("/health").status_code != 200
