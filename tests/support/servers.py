"""Start a real SGLang server in a separate process, send requests to it and stop it; servers of the shipped pairs.

Plain, under DFLASH, with prefill and decoding separate.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from sglang_dflash_lab.bench.server import free_port
from sglang_dflash_lab.pairs import drafter_path, target_path
from tests.support import preloaded

START_SECONDS = float(os.environ.get("SERVER_START_SECONDS") or 300)
# Launchers: what follows the Python interpreter.
LAUNCH_SERVER = ("-m", "sglang.launch_server")
SGLANG_SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


@dataclass(eq=False)
class Server:
    """A running server: its process, address and log."""

    process: subprocess.Popen[bytes]
    port: int
    log_path: Path
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    health: str = "/health"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def folder(self) -> Path:
        """Where its log is, and what the plugin reads and writes."""
        return self.log_path.parent

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=120)

    def post(self, path: str, body: dict[str, object] | None = None) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=600)

    def describe_end(self) -> str:
        return f"the server's exit code: {self.process.poll()}; its log:\n{self.log[-6000:]}"

    def family(self) -> list[psutil.Process]:
        """The server's process and everything it started."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def die_and_return(self) -> None:
        """Kill a scheduler, and later what is left; start the server again at its port, with the same log."""
        next(each for each in self.family() if "scheduler" in " ".join(each.cmdline())).kill()
        time.sleep(2)
        self.kill()
        with self.log_path.open("ab") as log:
            self.process = preloaded.start([*self.command], log, dict(self.environment))
        _wait_until_healthy(self, self.health)


_RUNNING: list[Server] = []


@contextlib.contextmanager
def running(
    folder: Path, *arguments: str, launcher: tuple[str, ...] = LAUNCH_SERVER, **environment: str
) -> Iterator[Server]:
    """A server that answers ``/health``; killed with all its children at the end, whatever happened."""
    port = free_port()
    if os.environ.get(REFUSALS):
        environment = with_refusals(environment)
    command = [sys.executable, *launcher, *arguments, "--host", "127.0.0.1", "--port", str(port)]
    with started(folder, port, command, **environment) as server:
        yield server


@contextlib.contextmanager
def started(
    folder: Path, port: int, command: list[str], health: str = "/health", **environment: str
) -> Iterator[Server]:
    """Like :func:`running`, for any command that serves ``port`` of this machine and answers ``health`` when it can."""
    log_path, environment = folder / f"server-{port}.log", {**os.environ, **environment}
    with log_path.open("wb") as log:
        process = preloaded.start(command, log, environment)
    server = Server(process, port, log_path, command, environment, health)
    _RUNNING.append(server)
    try:
        _wait_until_healthy(server, health)
        yield server
    except (httpx.TransportError, AssertionError) as error:
        error.add_note(server.describe_end())
        raise
    finally:
        _RUNNING.remove(server)
        server.kill()


def ended() -> list[Server]:
    """Return the servers that ended by themselves."""
    return [server for server in _RUNNING if server.process.poll() is not None]


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


DENSE = ("tiny-dense", "tiny-forks")
# Track boundaries of the recurrent states every 64 tokens, so that short prompts cross some inside a block.
TRACKED = ("--mamba-track-interval", "64")
BASE = ("--dtype", "float32", "--skip-tokenizer-init", "--max-running-requests", "8", "--enable-metrics")
BFLOAT16 = ("--dtype", "bfloat16", "--skip-tokenizer-init", "--max-running-requests", "8")
# In place of ``BASE``: every request feature.
FEATURES = (
    *("--dtype", "float32", "--max-running-requests", "16"),
    *("--enable-custom-logit-processor", "--enable-return-hidden-states", "--enable-streaming-session"),
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    # Enough for the JSON that the pairs were trained on; without it an answer can end in spaces without end.
    *("--constrained-json-max-whitespace-cnt", "3"),
)
_ADAPTIVE = ("--speculative-adaptive", "--speculative-adaptive-config")
# Another width at each step.
RANDOM_WIDTHS = (*_ADAPTIVE, str(preloaded.WIDTHS / "random_width.json"))
# Blocks of 16, with copies.
ONE_WIDTH = (*_ADAPTIVE, str(preloaded.WIDTHS / "16.json"))
# Always the full block, with copies: a block may be wider than the drafter's.
WIDE_WIDTHS = (*_ADAPTIVE, str(preloaded.WIDTHS / "widest.json"))
# Blocks of up to twice the drafter's width; overrides an earlier flag.
WIDE = ("--speculative-num-draft-tokens", "32")
# A draft window, pages and chunks; memory that can be released.
WINDOWED = (
    *("--speculative-draft-window-size", "64", "--page-size", "16", "--chunked-prefill-size", "64"),
    "--enable-memory-saver",
)
# Retract a request every fourth step.
RETRACTED = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "4"}
# Mooncake binds and announces addresses of this machine only. Its wheel loads the system's libibverbs, also for TCP.
_LOOPBACK = {"SGLANG_HOST_IP": "127.0.0.1", "HOST_IP": "127.0.0.1", "MC_TCP_BIND_ADDRESS": "127.0.0.1"}
# A machine under test is busy: wait long for a slow peer.
_PATIENCE = {f"SGLANG_DISAGGREGATION_{each}_TIMEOUT": "1800" for each in ("BOOTSTRAP", "WAITING")}
_PATIENCE |= {"SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE": "1000"}
# Of a run of tests: its servers end where CUDA would refuse what they do.
REFUSALS = "SERVERS_REFUSE"


def target_arguments(pair: str, base: tuple[str, ...] = BASE) -> tuple[str, ...]:
    tracked = () if pair in DENSE else TRACKED
    return ("--model-path", str(target_path(pair)), *base, *tracked)


def draft_arguments(pair: str, drafter: str | Path | None = "good", block: int = 16) -> tuple[str, ...]:
    given = () if drafter is None else ("--speculative-draft-model-path", str(_folder(pair, drafter)))
    return ("--speculative-algorithm", "DFLASH", *given, "--speculative-num-draft-tokens", str(block))


def _folder(pair: str, drafter: str | Path) -> Path:
    return drafter if isinstance(drafter, Path) else drafter_path(pair, drafter)


def changed_drafter(pair: str, folder: Path, **changes: object) -> Path:
    """Copy the pair's drafter to ``folder/drafter``, with other keys in its config.json."""
    copy = Path(shutil.copytree(drafter_path(pair), folder / "drafter"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **changes}))
    return copy


@contextlib.contextmanager
def plain_server(
    pair: str, folder: Path, *arguments: str, base: tuple[str, ...] = BASE, **environment: str
) -> Iterator[Server]:
    """Serve the pair's target without speculation; assert that our worker does not serve."""
    with running(folder, *target_arguments(pair, base), *arguments, **environment) as server:
        assert "sglang_dflash" not in server.get("/server_info").json()["internal_states"][0]
        yield server


@contextlib.contextmanager
def dflash_server(
    pair: str,
    folder: Path,
    *arguments: str,
    base: tuple[str, ...] = BASE,
    drafter: str | Path | None = "good",
    block: int = 16,
    launcher: tuple[str, ...] = LAUNCH_SERVER,
    **environment: str,
) -> Iterator[Server]:
    """Serve the pair under DFLASH, or copies alone without a drafter; assert that our worker serves it."""
    command = (*target_arguments(pair, base), *draft_arguments(pair, drafter, block), *arguments)
    with running(folder, *command, launcher=launcher, **environment) as server:
        info = worker_info(server)
        assert info["drafter"] == (None if drafter is None else str(_folder(pair, drafter)))
        assert info["block_size"] == block
        yield server


def recorded_blocks(folder: Path, rid: str | None = None) -> list[tuple[int, list[int]]]:
    """Return what the plugin's mode ``drafts`` wrote: position of each anchor, and the block from the anchor on.

    Of one request, or of all.
    """
    lines = map(json.loads, (folder / "drafts.jsonl").read_text().splitlines())
    return [(line["position"], line["block"]) for line in lines if rid in (None, line["rid"])]


def strict() -> dict[str, str]:
    """Return the environment of a server in which every host wait inside a step raises."""
    return {"SGLANG_DFLASH_TEST_STRICT": "1", "PYTHONPATH": path_with("plugin")}


def with_plugin(folder: Path, *modes: str) -> dict[str, str]:
    """Return the environment of a server that loads ``tests/plugin`` in these modes, which use ``folder``."""
    variables = {"SGLANG_DFLASH_TEST_PLUGIN": ",".join(modes), "SGLANG_DFLASH_TEST_FOLDER": str(folder)}
    return {"PYTHONPATH": path_with("plugin"), **variables}


def with_refusals(environment: dict[str, str]) -> dict[str, str]:
    """Return the environment of a server that ends where CUDA would refuse what it does."""
    modes = environment.get("SGLANG_DFLASH_TEST_PLUGIN", "").split(",")
    if not {"streams", "refusals"}.isdisjoint(modes):
        return environment
    return preloaded.with_modes(environment, "refusals")


def path_with(*folders: str) -> str:
    """Return PYTHONPATH with these folders of ``tests`` first."""
    first = (str(Path(__file__).parents[1] / folder) for folder in folders)
    return os.pathsep.join(filter(None, (*first, os.environ.get("PYTHONPATH"))))


def worker_info(server: Server) -> dict[str, Any]:
    """Return our worker's part of ``/server_info``."""
    info: dict[str, Any] = server.get("/server_info").json()["internal_states"][0]["sglang_dflash"]
    return info


def missing_transfer_backend() -> str | None:
    """Return why no K/V can be transferred here; None if Mooncake is installed (``docs/deployment.md``)."""
    try:
        importlib.import_module("mooncake.engine")
    except ImportError as error:
        return str(error)
    return None


@dataclass(frozen=True)
class Disaggregated:
    """SGLang's router, and the two servers behind it."""

    router: Server
    prefill: Server
    decode: Server


@contextlib.contextmanager
def disaggregated(
    pair: str, folder: Path, *flags: str, base: tuple[str, ...] = BASE, drafter: str | None = "good", **environment: str
) -> Iterator[Disaggregated]:
    """Serve the pair with prefill and decoding in two servers, under DFLASH if there is a drafter."""
    bootstrap = str(free_port())
    command = (*target_arguments(pair, base), *(draft_arguments(pair, drafter) if drafter else ()), *flags)
    transfer = ("--disaggregation-transfer-backend", "mooncake_tcp", "--disaggregation-bootstrap-port", bootstrap)
    environment = {**_LOOPBACK, **_PATIENCE, **environment}
    with contextlib.ExitStack() as stack:
        prefill, decode = (
            stack.enter_context(running(folder, *command, *transfer, "--disaggregation-mode", role, **environment))
            for role in ("prefill", "decode")
        )
        both = ("--prefill", prefill.url, bootstrap, "--decode", decode.url)
        unchecked = ("--disable-health-check", "--disable-circuit-breaker")
        yield Disaggregated(
            stack.enter_context(router(folder, "--pd-disaggregation", *unchecked, *both)), prefill, decode
        )


@contextlib.contextmanager
def router(folder: Path, *arguments: str) -> Iterator[Server]:
    """SGLang's router."""
    port = free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--policy", "round_robin", "--prometheus-port", str(free_port()), *arguments]
    with started(folder, port, command, "/readiness") as server:
        yield server
