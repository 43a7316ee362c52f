"""A fault costs what it costs plain decoding, and nothing else.

Numbers that are not finite; a scheduler that is killed at the worst moment; clients, disks and clocks that misbehave.
"""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from sglang_dflash_lab.pairs import target_path
from tests.serving.test_dflash_scheduling import DEAD_WITHIN, assert_death_is_noticed
from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all, tokens_per_step
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
WHOLE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def healthy(dflash_hybrid: Server) -> list[Answer]:
    return ask(dflash_hybrid)


def ask(server: Server) -> list[Answer]:
    flush(server)
    return ask_busy(server)


def ask_busy(server: Server) -> list[Answer]:
    return generate_all(server, corpus(PAIR, 8), 8, NEW_TOKENS, sampling_params=WHOLE)


@contextlib.contextmanager
def present(file: Path, text: str = "") -> Iterator[None]:
    file.write_text(text)
    yield
    file.unlink()


@pytest.mark.parametrize("fault", ["nan_context", pytest.param("nan_drafts", marks=pytest.mark.slow)])
def test_a_drafter_that_is_not_finite_costs_acceptance_alone(
    fault: str, dflash_hybrid: Server, healthy: list[Answer]
) -> None:
    server, folder = dflash_hybrid, dflash_hybrid.folder
    before = worker_info(server)["broken_drafts"]
    with present(folder / fault):
        spoiled = ask(server)
    after = ask(server)
    for answers in (spoiled, after):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in healthy]
    assert tokens_per_step(spoiled) < 1.5 < tokens_per_step(healthy)
    assert tokens_per_step(after) == tokens_per_step(healthy), "what was spoiled is still read"
    assert worker_info(server)["broken_drafts"] > before
    assert server.log.count("the drafter's output is not finite") == 1
    (shown,) = re.findall(r"^sglang_dflash:broken_drafts\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert float(shown) > 0


def test_a_target_that_is_not_finite_costs_one_request(dflash_hybrid: Server, healthy: list[Answer]) -> None:
    server, folder = dflash_hybrid, dflash_hybrid.folder
    flush(server)
    prompts = corpus(PAIR, 8)
    with present(folder / "nan_target", "spoiled"), ThreadPoolExecutor(8) as pool:
        hit = pool.submit(generate, server, prompts[0], NEW_TOKENS, sampling_params=WHOLE, rid="spoiled")
        rest = list(pool.map(lambda p: generate(server, p, NEW_TOKENS, sampling_params=WHOLE), prompts[1:]))
        assert hit.result().tokens != healthy[0].tokens
    assert [answer.tokens for answer in rest] == [answer.tokens for answer in healthy[1:]]
    assert [answer.tokens for answer in ask(server)] == [answer.tokens for answer in healthy]


# Flags of the server, and where its scheduler is killed. The kernel's own kill for memory is the same signal.
_WINDOW = ("--speculative-draft-window-size", "64", "--mamba-radix-cache-strategy", "extra_buffer")
DEATHS: dict[str, tuple[tuple[str, ...], str]] = {
    "between draft and commit": ((), "BEFORE sglang_dflash.worker.forwards.Verify.verify"),
    "in a prefill with a tail": (_WINDOW, "BEFORE sglang_dflash.features.window.DraftRings.store_tail"),
    "in a weight update": ((), "AFTER sglang.srt.models.qwen3_5.Qwen3_5ForCausalLM.load_weights"),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", DEATHS)
def test_a_scheduler_killed_at_the_worst_moment_ends_every_request(point: str, tmp_path: Path) -> None:
    flags, where = DEATHS[point]
    environment = {**with_plugin(tmp_path, "dies"), "SGLANG_DFLASH_TEST_DIES": where}
    with dflash_server(PAIR, tmp_path, *flags, base=FEATURES, **environment) as server:
        scheduler = next(each for each in server.family() if "scheduler" in " ".join(each.cmdline()))

        def kill() -> None:
            (tmp_path / "dies").touch()
            body = {"model_path": str(target_path(PAIR)), "abort_all_requests": True}
            with contextlib.suppress(httpx.TransportError):
                if "update" in point:
                    httpx.post(server.url + "/update_weights_from_disk", json=body, timeout=30)
            psutil.wait_procs([scheduler], timeout=30)
            assert not scheduler.is_running() or scheduler.status() == psutil.STATUS_ZOMBIE, "it never came there"

        assert_death_is_noticed(server, kill)


@contextlib.contextmanager
def silent_clients(server: Server) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        yield


def deaf_client(server: Server) -> contextlib.AbstractContextManager[httpx.Response]:
    params = {"temperature": 0, "max_new_tokens": 400, **WHOLE}
    body = {"input_ids": corpus(PAIR, 1)[0], "sampling_params": params, "stream": True}
    return httpx.stream("POST", server.url + "/generate", json=body, timeout=60)


CIRCUMSTANCES: dict[str, Callable[[Server], contextlib.AbstractContextManager[object]]] = {
    "a client does not read its stream": deaf_client,
    "200 connections send nothing": silent_clients,
    "the clock jumps an hour ahead": lambda server: present(server.folder / "clock", "3600"),
    "the clock jumps an hour back": lambda server: present(server.folder / "clock", "-3600"),
    "the disk of the log is full": lambda server: present(server.folder / "full"),  # the last one
}


@pytest.mark.slow
def test_circumstances_change_no_answer(healthy: list[Answer], tmp_path: Path) -> None:
    """No metrics of a request can be written, from the start."""
    for hour in (time.time(), time.time() + 3600):
        name = time.strftime("sglang-request-metrics-%Y%m%d_%H.log", time.localtime(hour))
        (tmp_path / name).symlink_to("/dev/full")
    flags = ("--export-metrics-to-file", "--export-metrics-to-file-dir", str(tmp_path), "--enable-metrics")
    expected = [answer.tokens for answer in healthy]
    with dflash_server(PAIR, tmp_path, *flags, base=FEATURES, **with_plugin(tmp_path, "surroundings")) as server:
        assert [answer.tokens for answer in ask_busy(server)] == expected
        assert "No space left on device" in server.log
        for name, circumstance in CIRCUMSTANCES.items():
            with circumstance(server):
                found = [answer.tokens for answer in ask_busy(server)]
                assert server.get("/health").status_code == 200, name
            assert found == expected, name
            assert [answer.tokens for answer in ask(server)] == expected, f"after: {name}"


@pytest.mark.slow
def test_a_killed_tokenizer_costs_its_own_requests(healthy: list[Answer], tmp_path: Path) -> None:
    """It is started again: every later request is right."""
    expected, flags = [answer.tokens for answer in healthy], ("--tokenizer-worker-num", "2")
    with dflash_server(PAIR, tmp_path, *flags, base=FEATURES) as server, ThreadPoolExecutor(8) as pool:
        worker = next(each for each in server.family()[1:] if listens(each, server.port))
        running = [pool.submit(generate, server, each, 200, sampling_params=WHOLE) for each in corpus(PAIR, 8)]
        time.sleep(0.5)
        worker.kill()
        errors = [each.exception(timeout=300) for each in running]
        assert all(error is None or isinstance(error, httpx.TransportError) for error in errors), errors
        deadline = time.monotonic() + DEAD_WITHIN
        while True:
            try:
                assert [answer.tokens for answer in ask_busy(server)] == expected
                break
            except httpx.TransportError:
                assert time.monotonic() < deadline
        assert_nothing_leaked(server)


def listens(process: psutil.Process, port: int) -> bool:
    return any(each.laddr.port == port for each in process.net_connections() if each.status == psutil.CONN_LISTEN)
