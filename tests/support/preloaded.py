"""Start SGLang in a process that has imported torch and SGLang's other libraries already.

A server imports 5,700 modules in each of three processes, most of them third-party. One process imports those once and
forks for each server; a server forks in the same way where ``multiprocessing`` would spawn. Every process imports
SGLang, its plugins and this package itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import importlib
import inspect
import json
import multiprocessing.util
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import setproctitle

_LIBRARIES = (
    *("torch", "torch.distributed.tensor", "torch._dynamo", "torch._inductor.compile_fx", "torchvision", "sympy"),
    *("transformers.modeling_utils", "transformers.integrations.hub_kernels", "transformers.models.gemma"),
    *("transformers.models.auto.processing_auto", "transformers.models.whisper.tokenization_whisper"),
    *("compressed_tensors.compressors", "xgrammar", "IPython.display", "aiohttp", "fastapi", "openai.types.responses"),
    *("torchvision.transforms.v2", "fsspec", "jsonschema", "requests", "uvicorn", "uvloop", "zmq"),
)
# Read by the interpreter, or while a library is imported.
_READ_EARLY = ("GOMP", "HF_", "KMP", "LD_", "MKL", "OMP", "PYTORCH", "TORCH", "TRANSFORMERS", "TRITON")
_PR_SET_CHILD_SUBREAPER = 36
_FREE_DESCRIPTORS = 600  # above those that a request names
_ASKING = threading.Lock()
_TESTS = Path(__file__).parents[1]
PLUGINS, WIDTHS = (_TESTS / "plugin", _TESTS.parent), _TESTS / "fixtures" / "widths"


class _Fork(subprocess.Popen[bytes]):
    """A command in a fork of a process that has imported the libraries; it ends with this process."""

    def _execute_child(self, *arguments: Any) -> None:
        given = inspect.signature(super()._execute_child).bind(*arguments).arguments  # type: ignore[misc]
        command, environment = given["args"], given["env"]
        paths = environment.get("PYTHONPATH", "").split(os.pathsep)
        customised = any(Path(path, "sitecustomize.py").exists() for path in paths)
        imports = command[0] == sys.executable and command[1] in ("-m", "-c") and not customised
        early = (name for name in {*environment, *os.environ} if imports and name.startswith(_READ_EARLY))
        others = {(name, environment.get(name)) for name in early if environment.get(name) != os.environ.get(name)}
        request = {"command": command, "imports": imports, "environment": environment}
        self.pid = _fork(_preloaded(frozenset(others)), request, {1: given["c2pwrite"], 2: given["errwrite"]})
        self._child_created = True


def run(
    *arguments: str, environment: dict[str, str] | None = None, timeout: float = 600
) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` to its end; like :func:`subprocess.run` with ``capture_output``."""
    with (
        tempfile.TemporaryFile("w+", errors="replace") as output,
        tempfile.TemporaryFile("w+", errors="replace") as errors,
    ):
        process = start([sys.executable, *arguments], output, environment or dict(os.environ), errors)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        for file in (output, errors):
            file.seek(0)
        return subprocess.CompletedProcess([*arguments], process.returncode, output.read(), errors.read())


def start(
    command: list[str], output: IO[Any], environment: dict[str, str], errors: IO[Any] | None = None
) -> subprocess.Popen[bytes]:
    """Run a command in a new session.

    It uses the imported libraries if it is this Python with a module or code that no path customises.
    """
    environment = _with_policy(command, environment)
    return _Fork(command, stdout=output, stderr=errors or output, env=environment, start_new_session=True)


def with_modes(environment: dict[str, str], *modes: str) -> dict[str, str]:
    """Return the environment in which a server loads ``tests/plugin`` in these modes too."""
    path, asked = environment.get("PYTHONPATH", ""), environment.get("SGLANG_DFLASH_TEST_PLUGIN", "").split(",")
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(filter(None, [*map(str, PLUGINS), *path.split(os.pathsep)]))),
        "SGLANG_DFLASH_TEST_PLUGIN": ",".join(filter(None, [*asked, *modes])),
    }


def _with_policy(command: list[str], environment: dict[str, str]) -> dict[str, str]:
    """A width file's name may be that of a mode of ``tests/plugin`` which replaces the policy."""
    modes = [file.stem for file in WIDTHS.glob("*wid*.json") if any(str(file) in word for word in command)]
    return with_modes(environment, *modes) if modes else environment


@cache
def _preloaded(others: frozenset[tuple[str, str | None]]) -> socket.socket:
    """Start the process that forks where these variables differ from this process's."""
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    environment = {name: value for name, value in {**os.environ, **dict(others)}.items() if value is not None}
    command = [sys.executable, __file__, str(its.fileno())]
    subprocess.Popen(command, pass_fds=[its.fileno()], env=environment, process_group=0)  # it ends with this process
    its.close()
    return ours


def _fork(zygote: socket.socket, request: dict[str, Any], descriptors: dict[int, int]) -> int:
    """Ask ``zygote``, a child of this process, for a fork that becomes a child of this process.

    The zygote forks twice. The orphaned grandchild is reparented to the nearest subreaper, which is this process.
    """
    message = json.dumps({**request, "folder": os.getcwd(), "descriptors": [*descriptors]}).encode()
    prctl = ctypes.CDLL(None).prctl
    with _ASKING:
        prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        socket.send_fds(zygote, [message], [*descriptors.values()])
        pid = int(zygote.recv(32))
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    return pid


def _serve(asker: socket.socket) -> dict[str, Any]:
    """Fork on each request, until the asker ends; return the request in the fork.

    Then kill the sessions that it started: an interrupted run of tests skips its finalisers.
    """
    started: list[psutil.Process] = []
    while True:
        message, received, *_ = socket.recv_fds(asker, 1 << 20, 64)
        if not message:
            for process in filter(psutil.Process.is_running, started):
                with contextlib.suppress(ProcessLookupError):  # of another session: a scheduler, say
                    os.killpg(process.pid, signal.SIGKILL)
            os._exit(0)
        reading, writing = os.pipe()
        between = os.fork()
        if not between:
            between = os.getpid()
            if pid := os.fork():
                os.write(writing, str(pid).encode())
                os._exit(0)
            while os.getppid() == between:
                pass
            for descriptor in (asker.detach(), reading, writing):
                os.close(descriptor)
            request: dict[str, Any] = json.loads(message)
            # The received numbers may be among the named ones.
            moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _FREE_DESCRIPTORS) for descriptor in received]
            for descriptor in received:
                os.close(descriptor)
            for descriptor, named in zip(moved, request["descriptors"], strict=True):
                os.dup2(descriptor, named)
                os.close(descriptor)
            return request
        os.waitpid(between, 0)
        pid = os.read(reading, 32)
        with contextlib.suppress(psutil.NoSuchProcess):
            started.append(psutil.Process(int(pid)))
        asker.send(pid)
        for descriptor in (reading, writing, *received):
            os.close(descriptor)


def _run(request: dict[str, Any]) -> None:
    """Become the command, or what ``multiprocessing`` spawns."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    if "code" in request:
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(request["code"], {"__name__": "__main__"})
        return
    os.setsid()
    if not request["imports"]:
        os.execvpe(request["command"][0], request["command"], request["environment"])
    sys.path[:1] = [request["folder"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kind, program, *sys.argv[1:] = request["command"][1:]
    if kind == "-c":
        sys.argv[0] = kind
        exec(program, {"__name__": "__main__"})
        return
    _fork_where_multiprocessing_spawns()
    runpy.run_module(program, run_name="__main__", alter_sys=True)


def _fork_where_multiprocessing_spawns() -> None:
    ours, its = socket.socketpair(type=socket.SOCK_SEQPACKET)
    if not os.fork():
        ours.close()
        _run(_serve(its))
        sys.exit()
    its.close()
    spawn = multiprocessing.util.spawnv_passfds

    def fork(path: bytes, arguments: list[str], descriptors: list[int]) -> int:
        if "--multiprocessing-fork" not in arguments:  # the tracker of resources
            return spawn(path, arguments, descriptors)
        code = arguments[arguments.index("-c") + 1]
        request = {"code": code, "environment": dict(os.environ)}
        return _fork(ours, request, {each: each for each in {1, 2, *descriptors}})

    multiprocessing.util.spawnv_passfds = fork


if __name__ == "__main__":
    asker = socket.socket(fileno=int(sys.argv[1]))
    for library in _LIBRARIES:
        importlib.import_module(library)
    setproctitle.getproctitle()  # finds the memory of the title while the environment is as at the start
    gc.freeze()
    _run(_serve(asker))
