"""Run a generated program in a subprocess with limits.

What holds: CPU seconds, memory, file size, open files, wall time; an empty environment, a temporary folder as home and
working directory, isolated mode (no user site, no ``PYTHON*`` variables), its own session so that children die with it,
and, if the kernel lets an unprivileged user make namespaces, no network.
What does not: the program can read files that the user can read. Run benchmarks with generated code in a container
if that matters.
"""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

MIB = 1 << 20
_KEPT_BYTES = 100_000  # of a program's output


@dataclass(frozen=True)
class Limits:
    """CPU and wall-clock seconds, address space and file size in bytes, number of open files."""

    cpu_s: int = 5
    wall_s: float = 15.0
    memory_bytes: int = 512 * MIB
    file_bytes: int = 1 * MIB
    open_files: int = 32


@dataclass(frozen=True)
class Outcome:
    """``ok``: exit status 0 within the limits. ``stdout``: the beginning of what the program printed."""

    ok: bool
    stdout: str


def run_program(source: str, stdin: str = "", limits: Limits | None = None) -> Outcome:
    """Run ``source`` as a Python program; whatever it does is an ``Outcome``, never an exception."""
    limits = limits or Limits()
    with tempfile.TemporaryDirectory(prefix="bench-sandbox-") as folder:
        program = f"{folder}/program.py"
        with open(program, "w") as file:
            file.write(source)
        # Output goes to a file, not a pipe: the file-size limit then bounds it too.
        with open(f"{folder}/out", "w+b") as out:
            process = subprocess.Popen(
                [*_without_network(), sys.executable, "-I", program],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.DEVNULL,
                cwd=folder,
                env={"HOME": folder, "PATH": os.defpath},
                start_new_session=True,
                preexec_fn=functools.partial(_limit, limits),
            )
            try:
                process.communicate(stdin.encode(), timeout=limits.wall_s)
                ok = process.returncode == 0
            except subprocess.TimeoutExpired:
                ok = False
            finally:
                _kill_session(process)
            out.seek(0)
            return Outcome(ok, out.read(_KEPT_BYTES).decode(errors="replace"))


def _limit(limits: Limits) -> None:
    for kind, value in (
        (resource.RLIMIT_CPU, limits.cpu_s),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(kind, (value, value))


@functools.cache
def _without_network() -> tuple[str, ...]:
    """``unshare`` with a user and a network namespace of its own, if this machine allows it."""
    program = shutil.which("unshare")
    if program is None:
        return ()
    command = (program, "--map-root-user", "--net")
    allowed = subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0
    return command if allowed else ()


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of the program's session, its children included."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
