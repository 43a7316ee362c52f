"""A fault costs what it costs plain decoding, and nothing else.

Numbers that are not finite; a scheduler that is killed at the worst moment; clients, disks and clocks that misbehave.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from sglang_dflash_lab.pairs import target_path
from tests.serving.test_dflash_scheduling import DEAD_WITHIN, assert_death_is_noticed
from tests.support.generation import Answer, flush, generate, generate_all, tokens_per_step
from tests.support.prompts import corpus
from tests.support.servers import FEATURES, Server, dflash_server, plain_server, with_plugin, worker_info

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
WHOLE = {"ignore_eos": True}


@pytest.fixture(scope="module")
def healthy(dflash_hybrid: Server) -> list[Answer]:
    return ask(dflash_hybrid)


def ask(server: Server) -> list[Answer]:
    flush(server)
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
_STEP = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
_LOAD = "sglang.srt.models.qwen3_5.Qwen3_5ForCausalLM.load_weights"
_WINDOW = ("--speculative-draft-window-size", "64", "--mamba-radix-cache-strategy", "extra_buffer")
DEATHS: dict[str, tuple[Any, tuple[str, ...], str]] = {
    "plain decoding, before a step": (plain_server, (), f"BEFORE {_STEP}"),
    "plain decoding, in a weight update": (plain_server, (), f"AFTER {_LOAD}"),
    "between draft and commit": (dflash_server, (), "BEFORE sglang_dflash.worker.forwards.Verify.verify"),
    "in a prefill with a tail": (dflash_server, _WINDOW, "BEFORE sglang_dflash.features.window.DraftRings.store_tail"),
    "in a weight update": (dflash_server, (), f"AFTER {_LOAD}"),
}


@pytest.mark.slow
@pytest.mark.parametrize("point", DEATHS)
def test_a_scheduler_killed_at_the_worst_moment_ends_every_request(point: str, tmp_path: Path) -> None:
    serve, flags, where = DEATHS[point]
    environment = {**with_plugin(tmp_path, "dies"), "SGLANG_DFLASH_TEST_DIES": where}
    with serve(PAIR, tmp_path, *flags, base=FEATURES, **environment) as server:
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
def clients(server: Server, number: int, text: bytes = b"") -> Iterator[None]:
    """Connections that send ``text`` and then read a byte a second."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(number)]
        ended = threading.Event()

        def read() -> None:
            while not ended.wait(1):
                for each in sockets if text else ():
                    each.recv(1)

        for each in sockets:
            each.sendall(text)
        thread = threading.Thread(target=read)
        thread.start()
        yield
        ended.set()
        thread.join()


def slow_reader(server: Server) -> contextlib.AbstractContextManager[None]:
    params = {"temperature": 0, "max_new_tokens": 400, **WHOLE}
    body = json.dumps({"input_ids": corpus(PAIR, 1)[0], "sampling_params": params, "stream": True})
    head = (
        f"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return clients(server, 1, (head + body).encode())


CIRCUMSTANCES: dict[str, Callable[[Server], contextlib.AbstractContextManager[None]]] = {
    "a client reads a byte a second": slow_reader,
    "200 connections send nothing": lambda server: clients(server, 200),
    "the clock jumps an hour ahead": lambda server: present(server.folder / "clock", "3600"),
    "the clock jumps an hour back": lambda server: present(server.folder / "clock", "-3600"),
    "the disk of the log is full": lambda server: present(server.folder / "full"),  # the last one
}


@pytest.mark.slow
@pytest.mark.parametrize("serve", [plain_server, dflash_server])
def test_circumstances_change_no_answer(serve: Any, healthy: list[Answer], tmp_path: Path) -> None:
    """Of plain decoding neither. No metrics of a request can be written, from the start."""
    for hour in (time.time(), time.time() + 3600):
        name = time.strftime("sglang-request-metrics-%Y%m%d_%H.log", time.localtime(hour))
        (tmp_path / name).symlink_to("/dev/full")
    flags = ("--export-metrics-to-file", "--export-metrics-to-file-dir", str(tmp_path), "--enable-metrics")
    expected = [answer.tokens for answer in healthy]
    with serve(PAIR, tmp_path, *flags, base=FEATURES, **with_plugin(tmp_path, "surroundings")) as server:
        assert [answer.tokens for answer in ask_busy(server)] == expected
        assert "No space left on device" in server.log
        for name, circumstance in CIRCUMSTANCES.items():
            with circumstance(server):
                found = [answer.tokens for answer in ask_busy(server)]
                assert server.get("/health").status_code == 200, name
            assert found == expected, name
            flush(server)
            assert [answer.tokens for answer in ask_busy(server)] == expected, f"after: {name}"


def ask_busy(server: Server) -> list[Answer]:
    return generate_all(server, corpus(PAIR, 8), 8, NEW_TOKENS, sampling_params=WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize("serve", [plain_server, dflash_server])
def test_a_killed_tokenizer_costs_its_own_requests(serve: Any, healthy: list[Answer], tmp_path: Path) -> None:
    """It is started again: every later request is right."""
    expected = [answer.tokens for answer in healthy]
    with serve(PAIR, tmp_path, "--tokenizer-worker-num", "2", base=FEATURES) as server, ThreadPoolExecutor(8) as pool:
        worker, *_ = (each for each in server.family()[1:] if server.port in ports(each))
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
        flush(server)
        assert server.get("/health_generate").status_code == 200


def ports(process: psutil.Process) -> set[int]:
    return {each.laddr.port for each in process.net_connections() if each.status == psutil.CONN_LISTEN}
