"""Start a real SGLang server in a process of its own, talk to it, stop it and look for what it leaves behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from sglang_dflash_lab.bench.server import free_port
from tests.support import preloaded

START_SECONDS = float(os.environ.get("SERVER_START_SECONDS") or 300)
# Launchers: what follows the Python interpreter.
LAUNCH_SERVER = ("-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@dataclass(eq=False)
class Server:
    """A running server: its process, address and log."""

    process: preloaded.Process | subprocess.Popen[bytes]
    port: int
    log_path: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=120)

    def post(self, path: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=600)

    def family(self) -> list[psutil.Process]:
        """The server's process and everything it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]


def command(*arguments: str, launcher: tuple[str, ...] = LAUNCH_SERVER) -> list[str]:
    return [sys.executable, *launcher, *arguments]


@contextlib.contextmanager
def running(
    folder: Path,
    *arguments: str,
    launcher: tuple[str, ...] = LAUNCH_SERVER,
    **environment: str,
) -> Iterator[Server]:
    """A server that answers ``/health``; killed with all its children at the end, whatever happened."""
    port = free_port()
    address = ("--host", "127.0.0.1", "--port", str(port))
    with started(folder, port, command(*arguments, *address, launcher=launcher), **environment) as server:
        yield server


@contextlib.contextmanager
def started(
    folder: Path, port: int, command: list[str], health: str = "/health", **environment: str
) -> Iterator[Server]:
    """Like :func:`running`, for any command that serves ``port`` of this machine and answers ``health`` when it can."""
    log_path = folder / f"server-{port}.log"
    with log_path.open("wb") as log:
        process = preloaded.start(command[1:], log, {**os.environ, **environment})
    server = Server(process, port, log_path)
    try:
        _wait_until_healthy(server, health)
        yield server
    except (httpx.TransportError, AssertionError) as error:
        error.add_note(f"the server's exit code: {process.poll()}; its log:\n{server.log[-6000:]}")
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_until_healthy(server: Server, health: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"server ended with {server.process.returncode}:\n{server.log[-6000:]}")
        with contextlib.suppress(httpx.TransportError):
            if server.get(health).status_code == 200:
                return
        time.sleep(0.5)
    raise AssertionError(f"server not healthy after {START_SECONDS} s:\n{server.log[-6000:]}")
