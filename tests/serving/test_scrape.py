"""A real Prometheus scrapes two replicas and their router, and has an answer to every query of the dashboard."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import httpx
import pytest
import yaml

from sglang_dflash.bench.server import free_port
from tests.support.generation import generate_all
from tests.support.grafana import queries
from tests.support.prompts import corpus
from tests.support.servers import START_SECONDS, started

PAIR = "tiny-dense"
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "replicas.sh"
SHIPPED = ROOT / "docs" / "grafana" / "prometheus.yml"
ROUTER_METRICS = 29000  # the router's own default
RATE_INTERVAL = "20s"

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus (apt-get install prometheus)"),
]


def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    router, first, prometheus = free_port(), free_port(), free_port()
    replicas = [f"127.0.0.1:{first + i}" for i in (0, 1)]
    environment = {
        "PYTHON": sys.executable,
        "PAIR": PAIR,
        "ROUTER_PORT": str(router),
        "FIRST_PORT": str(first),
    }
    command = [str(SCRIPT), "demo", "--enable-metrics", "--speculative-adaptive"]
    watching = [
        *("prometheus", f"--config.file={config(tmp_path, [*replicas, f'127.0.0.1:{ROUTER_METRICS}'])}"),
        *(f"--storage.tsdb.path={tmp_path / 'tsdb'}", f"--web.listen-address=127.0.0.1:{prometheus}"),
    ]
    with (
        started(tmp_path, router, command, "/readiness", **environment) as asked,
        started(tmp_path, prometheus, watching, "/-/ready") as watched,
    ):
        deadline = time.monotonic() + START_SECONDS
        while unanswered := [query for query in queries() if not answered(watched.url, query[1])]:
            assert time.monotonic() < deadline, unanswered
            generate_all(asked, corpus(PAIR, 8), 8, 32)
        seen = httpx.get(f"{watched.url}/api/v1/query", params={"query": "sglang:num_running_reqs"}).json()
        assert {found["metric"]["instance"] for found in seen["data"]["result"]} == set(replicas)


def config(folder: Path, targets: list[str]) -> Path:
    """The one that is shipped, with these targets and less patience."""
    settings = yaml.safe_load(SHIPPED.read_text())
    settings["global"] = {"scrape_interval": "2s", "scrape_timeout": "2s"}
    settings["scrape_configs"][0]["static_configs"] = [{"targets": targets}]
    file = folder / "prometheus.yml"
    file.write_text(yaml.safe_dump(settings))
    return file


def answered(url: str, query: str) -> bool:
    query = query.replace("$__rate_interval", RATE_INTERVAL)
    reply = httpx.get(f"{url}/api/v1/query", params={"query": query}, timeout=60).json()
    assert reply["status"] == "success", (query, reply)
    return bool(reply["data"]["result"])
