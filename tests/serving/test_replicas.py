"""Two replicas behind SGLang's router, as ``launch/replicas.sh`` starts them, scraped by a real Prometheus."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import psutil
import pytest

from sglang_dflash_lab.bench.server import free_port
from tests.support.generation import generate_all
from tests.support.pair_servers import dflash_server, worker_info
from tests.support.prompts import corpus
from tests.support.servers import START_SECONDS, Server, started

PAIR = "tiny-dense"
ROOT = Path(__file__).parents[2]
ROUTER_METRICS = 29000  # the router's own default

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1200)]


@contextmanager
def routed(folder: Path, *flags: str) -> Iterator[tuple[Server, list[Server]]]:
    """The router and the replicas behind it."""
    port, first = free_port(), free_port()
    ports = {"ROUTER_PORT": str(port), "FIRST_PORT": str(first)}
    environment = {"PYTHON": sys.executable, "PAIR": PAIR, "POLICY": "round_robin", **ports}
    command = [str(ROOT / "launch" / "replicas.sh"), "demo", *flags]
    with started(folder, port, command, "/readiness", **environment) as router:
        wait_until(lambda: router.get("/workers").json()["stats"]["regular_count"] == 2)
        yield router, [Server(router.process, first + i, router.log_path) for i in (0, 1)]


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.5)


def steps(replica: Server) -> int:
    return sum(worker_info(replica)["steps_by_width"].values())


def test_both_replicas_answer_like_one_server_and_stop_with_the_script(tmp_path: Path) -> None:
    inputs = corpus(PAIR, 8, seed=11)
    with dflash_server(PAIR, tmp_path) as server:
        expected = [answer.tokens for answer in generate_all(server, inputs, 4)]
    with routed(tmp_path) as (router, replicas):
        before = [steps(replica) for replica in replicas]
        for concurrency in (4, 1):
            answers = generate_all(router, inputs, concurrency)
            assert [answer.tokens for answer in answers] == expected
        assert all(steps(replica) > count for replica, count in zip(replicas, before, strict=True))
        client = openai.OpenAI(base_url=router.url + "/v1", api_key="none", max_retries=0)
        question = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many apples does Tom have now?"}]
        model = client.models.list().data[0].id
        assert client.chat.completions.create(model=model, messages=question, max_tokens=8).choices[0].message.content

        family = router.family()
        router.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=60)
        for process in alive:
            process.kill()
        assert not alive
