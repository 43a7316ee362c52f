"""What breaks while a server runs costs the request that it hits, and no other; the health endpoints tell the truth."""

from __future__ import annotations

import contextlib
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.support.generation import Answer, assert_nothing_leaked, flush, generate, generate_all
from tests.support.pair_servers import dflash_server, with_plugin, worker_info
from tests.support.prompts import corpus
from tests.support.servers import Server

pytestmark = pytest.mark.engine

PAIR = "tiny-hybrid"
NEW_TOKENS = 64
WHOLE = {"ignore_eos": True}
DEAD_WITHIN = 60.0  # seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with dflash_server(PAIR, folder, **with_plugin(folder, "faults")) as server:
        yield server


@pytest.fixture(scope="module")
def healthy(server: Server) -> list[Answer]:
    return ask(server)


def ask(server: Server) -> list[Answer]:
    flush(server)
    return generate_all(server, corpus(PAIR, 8), 8, NEW_TOKENS, sampling_params=WHOLE)


def accept_length(answers: list[Answer]) -> float:
    return sum(len(a.tokens) for a in answers) / sum(a.meta["spec_verify_ct"] for a in answers)


@contextlib.contextmanager
def present(file: Path, text: str = "") -> Iterator[None]:
    file.write_text(text)
    yield
    file.unlink()


@pytest.mark.parametrize("fault", ["nan_context", "nan_drafts"])
def test_a_drafter_that_is_not_finite_costs_acceptance_alone(
    fault: str, server: Server, folder: Path, healthy: list[Answer]
) -> None:
    before = worker_info(server)["broken_drafts"]
    with present(folder / fault):
        spoiled = ask(server)
    after = ask(server)
    for answers in (spoiled, after):
        assert [answer.tokens for answer in answers] == [answer.tokens for answer in healthy]
    assert accept_length(spoiled) < 1.5 < accept_length(healthy)
    assert accept_length(after) == accept_length(healthy), "what was spoiled is still read"
    assert worker_info(server)["broken_drafts"] > before
    assert server.log.count("the drafter's output is not finite") == 1
    (shown,) = re.findall(r"^sglang_dflash:broken_drafts\{.*\} (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert float(shown) > 0


def test_a_target_that_is_not_finite_costs_one_request(server: Server, folder: Path, healthy: list[Answer]) -> None:
    flush(server)
    prompts = corpus(PAIR, 8)
    with present(folder / "nan_target", "spoiled"), ThreadPoolExecutor(8) as pool:
        hit = pool.submit(generate, server, prompts[0], NEW_TOKENS, sampling_params=WHOLE, rid="spoiled")
        rest = list(pool.map(lambda p: generate(server, p, NEW_TOKENS, sampling_params=WHOLE), prompts[1:]))
        assert hit.result().tokens != healthy[0].tokens
    assert [answer.tokens for answer in rest] == [answer.tokens for answer in healthy[1:]]
    assert [answer.tokens for answer in ask(server)] == [answer.tokens for answer in healthy]


def test_a_dead_scheduler_ends_its_requests_and_the_servers_health(server: Server) -> None:
    """The last test of this server."""
    assert_nothing_leaked(server)
    kill(server, "sglang::scheduler")


@pytest.mark.slow
def test_so_does_a_dead_rank_of_two(tmp_path: Path) -> None:
    with dflash_server(PAIR, tmp_path, "--tp-size", "2") as server:
        kill(server, "scheduler_TP1")


def kill(server: Server, name: str) -> None:
    """Whoever waits is told, and nobody is told that all is well."""
    told = threading.Event()

    def wait_for_answer() -> None:
        with contextlib.suppress(httpx.TransportError, AssertionError):
            generate(server, corpus(PAIR, 1)[0], 4000, sampling_params=WHOLE)
        told.set()

    assert server.get("/health").status_code == 200
    threading.Thread(target=wait_for_answer, daemon=True).start()
    time.sleep(1.0)
    next(p for p in server.family() if name in " ".join(p.cmdline())).send_signal(signal.SIGKILL)
    assert told.wait(DEAD_WITHIN), "a request still waits"
    assert not is_healthy(server)


def is_healthy(server: Server) -> bool:
    try:
        return server.get("/health").status_code == 200
    except httpx.TransportError:
        return False
