"""Replicas on one machine, each as slow as a device of its own, and SGLang's router in front of some of them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx

from measure.replicas_many import LEAST_LOADED, RANDOM
from sglang_dflash.bench.configure import configure
from sglang_dflash.bench.modes import Mode
from sglang_dflash.bench.options import Options
from sglang_dflash.bench.ports import free_port
from sglang_dflash.bench.server import Launch, stop
from sglang_dflash.errors import DFlashError

ROOT = Path(__file__).parents[1]
# The cache-aware policy with its thresholds at nothing: a replica that holds more than another is passed over.
_POLICIES = {
    RANDOM: ("--policy", "random"),
    LEAST_LOADED: (
        *("--policy", "cache_aware", "--cache-threshold", "1.0"),
        *("--balance-abs-threshold", "0", "--balance-rel-threshold", "1.0"),
    ),
}
_START_SECONDS = 300
_SERIES = re.compile(r"^([\w:]+)(?:\{.*\})? (\S+)$", re.MULTILINE)


def paced(pair: str, block: int, slots: int, pace: str) -> Launch:
    """A replica.

    Args:
        slots: requests that it serves at once.
        pace: milliseconds of a prefill, of a decode step, of each request in it.
    """
    mode = Mode.parse(f"dflash:{block}")
    options = Options(pair=pair, modes=mode.label, concurrency=str(slots), server_args="--enable-metrics")
    launch = configure(options).launch(mode)
    plugin = {
        "PYTHONPATH": str(ROOT / "tests/plugin"),
        "SGLANG_DFLASH_TEST_PLUGIN": "paced",
        "SGLANG_DFLASH_TEST_PACE": pace,
    }
    return replace(launch, env=(*launch.env, *plugin.items()))


@contextlib.asynccontextmanager
async def routed(policy: str, replicas: list[str], log: Path) -> AsyncIterator[str]:
    """The router's URL; it is ready and knows all replicas.

    Raises:
        DFlashError: it did not get that far.
    """
    port = free_port()
    command = [
        *(sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-port", str(free_port()), *_POLICIES[policy], "--worker-urls", *replicas),
    ]
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
            deadline = time.monotonic() + _START_SECONDS
            while not await _knows(http, len(replicas)):
                if time.monotonic() > deadline:
                    raise DFlashError(
                        f"a router without its {len(replicas)} replicas after {_START_SECONDS} s",
                        expected="all of them in /workers",
                        remedy=f"see {log}",
                    )
                await asyncio.sleep(0.5)
        yield url
    finally:
        stop(process)


async def _knows(http: httpx.AsyncClient, replicas: int) -> bool:
    with contextlib.suppress(httpx.TransportError):
        if (await http.get("/readiness")).status_code == 200:
            known: int = (await http.get("/workers")).json()["stats"]["regular_count"]
            return known == replicas
    return False


async def counters(replica: str) -> dict[str, float]:
    """A replica's series by name."""
    async with httpx.AsyncClient(base_url=replica, timeout=30, trust_env=False) as http:
        return sums((await http.get("/metrics")).text)


def sums(text: str) -> dict[str, float]:
    """Series of Prometheus' text format by name, summed over their labels."""
    found: dict[str, float] = {}
    for name, value in _SERIES.findall(text):
        found[name] = found.get(name, 0.0) + float(value)
    return found
