"""Start, find and stop the SGLang servers that a benchmark measures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

from sglang_dflash.errors import DFlashError

# Below the range that the kernel hands to outgoing connections (32768 and up on Linux): a port of that range can be
# free when asked and taken when an SGLang server, 20 s later, binds it. SGLang itself picks from 22000 to 29999.
_PORTS = range(10000, 22000)
_choice = random.SystemRandom()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nothing listens on, outside the ephemeral range."""
    while True:
        port = _choice.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


START_TIMEOUT_S = 1800.0
_STOP_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Launch:
    """A server to be started: arguments of ``sglang.launch_server`` without host and port, and extra environment."""

    args: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = ()

    def command(self, port: int) -> list[str]:
        return [
            sys.executable, "-m", "sglang.launch_server", *self.args, "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def describe(self) -> str:
        """The command as a shell would take it, without the port, which is chosen anew for every start."""
        return shlex.join([*(f"{k}={v}" for k, v in self.env), "python", "-m", "sglang.launch_server", *self.args])


def _interrupt(*_: object) -> None:
    """Do what Ctrl-C does, even in a background job, whose shell made it ignore SIGINT."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """Let SIGTERM end this process as Ctrl-C does: a server is in a session of its own and would outlive it."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.asynccontextmanager
async def running(launch: Launch, log: Path, timeout_s: float = START_TIMEOUT_S) -> AsyncIterator[str]:
    """Start a server, yield its base URL once it answers, and stop it with all its children.

    Raises:
        DFlashError: it stopped or did not answer in time; the error ends with the last lines of its log.
    """
    port = free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        output.write(launch.describe() + "\n")
        output.flush()
        process = subprocess.Popen(
            launch.command(port),
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **dict(launch.env)},
            start_new_session=True,  # Ctrl-C goes to the benchmark, which stops its servers itself
        )
    try:
        with _terminated_like_interrupted():
            base_url = f"http://127.0.0.1:{port}"
            await _wait(process, base_url, log, timeout_s)
            yield base_url
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to the server's whole session, SIGKILL to what is still there after 20 s."""
    with contextlib.suppress(ProcessLookupError):  # raised once nothing of the session is left
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(process.pid, number)
            deadline = time.monotonic() + _STOP_TIMEOUT_S
            while time.monotonic() < deadline:
                process.poll()
                os.killpg(process.pid, 0)
                time.sleep(0.1)


async def _wait(process: subprocess.Popen[bytes], base_url: str, log: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(base_url=base_url, timeout=10, trust_env=False) as http:
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise _failed(f"the server stopped with exit status {process.returncode}", log)
            with contextlib.suppress(httpx.TransportError):
                # 200 only once the scheduler has served a first request of the server's own
                if (await http.get("/health")).status_code == 200:
                    return
            await asyncio.sleep(0.5)
    raise _failed(f"the server did not answer within {timeout_s:.0f} s", log)


def _failed(what: str, log: Path) -> DFlashError:
    tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
    return DFlashError(what, expected="a server that answers /health", remedy=f"see {log}, which ends with:\n{tail}\n")
