"""Servers that a benchmark measures."""

from __future__ import annotations

import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from sglang_dflash.errors import DFlashError

# Below the ephemeral range (32768 and up on Linux), whose ports an outgoing connection can take during the 20 s of a
# start. SGLang uses 22000 to 29999.
_PORTS = range(10000, 22000)
_choice = random.SystemRandom()
START_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 20.0


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 below the ephemeral range."""
    while True:
        port = _choice.choice(_PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Launch:
    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()

    def command(self, port: int) -> list[str]:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        return [sys.executable, "-m", "sglang.launch_server", *self.args, *address]

    def describe(self) -> str:
        return shlex.join([*(f"{k}={v}" for k, v in self.env), "python", "-m", "sglang.launch_server", *self.args])


@contextlib.contextmanager
def running(launch: Launch, log: Path, timeout_s: float = START_TIMEOUT_S) -> Iterator[str]:
    """Start a server, yield its base URL once it answers, and stop it with its children.

    Raises:
        DFlashError: it stopped or did not answer in time; the error ends with its log.
    """
    with starting(launch, log, timeout_s) as answers:
        yield answers()


@contextlib.contextmanager
def starting(launch: Launch, log: Path, timeout_s: float = START_TIMEOUT_S) -> Iterator[Callable[[], str]]:
    """The same, but yield at once a function that waits and returns the base URL: several servers start together.

    On a GPU they would divide the same free memory.
    """
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    # The server has its own session.
    before = signal.signal(signal.SIGTERM, _interrupt)
    with log.open("w") as output:
        print(launch.describe(), file=output, flush=True)
        command, environment = launch.command(port), {**os.environ, **dict(launch.env)}
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        yield lambda: _wait(process, f"http://127.0.0.1:{port}", log, timeout_s)
    finally:
        signal.signal(signal.SIGTERM, before)
        stop(process)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def stop(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the server's session, and SIGKILL after 20 s."""
    with contextlib.suppress(ProcessLookupError):  # raised once the session is empty
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)


def _wait(process: subprocess.Popen[bytes], base_url: str, log: Path, timeout_s: float) -> str:
    deadline = time.monotonic() + timeout_s
    with httpx.Client(base_url=base_url, timeout=10, trust_env=False) as http:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise _failed(f"the server stopped with exit status {process.returncode}", log)
            with contextlib.suppress(httpx.TransportError):
                # 200 once the scheduler serves requests
                if http.get("/health").status_code == 200:
                    return base_url
            time.sleep(0.5)
    raise _failed(f"the server did not answer within {timeout_s:.0f} s", log)


def _failed(what: str, log: Path) -> DFlashError:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    return DFlashError(what, remedy=f"see {log}, which ends with:\n{tail}\n")
