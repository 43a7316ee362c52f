"""Prefill and decoding in two servers of a pair on this machine, with SGLang's router in front."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sglang_dflash_lab.bench.server import free_port
from tests.support.pair_servers import draft_arguments, target_arguments
from tests.support.servers import Server, running, started

# Mooncake binds and announces addresses of this machine only. Its wheel loads the system's libibverbs, also for TCP.
LOOPBACK = {"SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
# A machine under test is busy: nobody gives up on a slow peer.
PATIENCE = {f"SGLANG_DISAGGREGATION_{each}_TIMEOUT": "1800" for each in ("BOOTSTRAP", "WAITING")}
PATIENCE |= {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000"}


def missing_backend() -> str | None:
    """Why no K/V can be transferred here; None if Mooncake is installed (``docs/deployment.md``)."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Disaggregated:
    """The router, and the two servers behind it."""

    router: Server
    prefill: Server
    decode: Server


@contextlib.contextmanager
def disaggregated(
    pair: str,
    folder: Path,
    *arguments: str,
    drafter: str = "good",
    **environment: str,
) -> Iterator[Disaggregated]:
    """The pair under DFLASH in two servers."""
    bootstrap, port = free_port(), free_port()
    command = (*target_arguments(pair), *draft_arguments(pair, drafter), *arguments)
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", str(bootstrap))
    environment = {**LOOPBACK, **PATIENCE, **environment}
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(running(folder, *command, *transfer, "--disaggregation-mode", role, **environment))
            for role in ("prefill", "decode")
        )
        router = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        router += [
            "--pd-disaggregation",
            "--policy",
            "round_robin",
            "--disable-health-check",
            "--disable-circuit-breaker",
            "--prometheus-port",
            str(free_port()),
        ]
        router += ["--prefill", prefill.url, str(bootstrap), "--decode", decode.url]
        yield Disaggregated(stack.enter_context(started(folder, port, router, "/readiness")), prefill, decode)
