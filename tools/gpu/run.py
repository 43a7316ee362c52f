"""The run of a step: device, results folder, resumable measurements, and servers with the device's flags."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.pair_servers import BFLOAT16, draft_arguments, target_arguments
from tests.support.servers import Server, running
from tools.gpu import records
from tools.gpu.site import CUDA, STAND_INS

Measure = Callable[[], dict[str, Any]]
# Attention backend -> the package that contains its kernels.
PACKAGES = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}


@dataclass(frozen=True)
class Run:
    """One step's run.

    Attributes:
        device: ``cuda``; or ``cpu``, where each step runs at a small size to show that it works.
        out: folder for rows, logs and traces.
        step: name of the step.
        pairs: pairs to measure; empty for the step's own choice.
    """

    device: str
    out: Path
    step: str
    pairs: tuple[str, ...] = ()

    @property
    def real(self) -> bool:
        return self.device == CUDA

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the attention backends that can run: Triton, and those that are installed."""
        installed = (name for name, package in PACKAGES.items() if self.real and _is_installed(package))
        return ("triton", *installed) if self.real else ("default",)

    def flags(self, *, speculative: bool, backend: str = "triton") -> tuple[str, ...]:
        """Return the server flags that the device needs."""
        draft = ("--speculative-draft-attention-backend", backend) if speculative else ()
        return ("--attention-backend", backend, "--sampling-backend", "pytorch", *draft) if self.real else ()

    @contextlib.contextmanager
    def serve(
        self, pair: str, *flags: str, speculative: bool = True, backend: str = "triton", **environment: str
    ) -> Iterator[Server]:
        """Serve a tiny pair in bfloat16, with or without its drafter."""
        models = (*target_arguments(pair, BFLOAT16), *(draft_arguments(pair) if speculative else ()))
        command = (*models, *self.flags(speculative=speculative, backend=backend), *flags)
        with running(self.out, *command, **environment) as server:
            yield server

    def write(self, **row: Any) -> None:
        records.append(self.out, self.step, {"device": self.device, **row})
        print(row, flush=True)

    def finished(self, **key: Any) -> bool:
        """Return whether an earlier call measured this key without an error."""
        key["device"] = self.device
        rows = (row for row in records.read(self.out, self.step) if "error" not in row)
        return any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    def measure(self, key: dict[str, Any], measured: Measure) -> bool:
        """Write a row with what was measured, or with the error. Return False after an error.

        A finished key is not measured again, so an interrupted step resumes where it stopped.
        """
        if self.finished(**key):
            return True
        start = time.monotonic()
        try:
            found = measured()
        except Exception as error:  # noqa: BLE001 - a server that ends or a wrong answer is a result
            found = {"error": describe(error)}
        self.write(**key, **found, seconds=round(time.monotonic() - start, 1))
        return "error" not in found

    def measure_each(self, cells: Iterable[tuple[dict[str, Any], Measure]]) -> bool:
        """Measure every (key, call), whether or not others fail. Return False if one failed."""
        return not [key for key, measured in cells if not self.measure(key, measured)]


def describe(error: Exception) -> str:
    """Return the end of the server's log, then the error and the line that raised it."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{notes}\n{place.filename}:{place.lineno}: {type(error).__name__}: {error}"[-6000:].strip()


def memory_used() -> int:
    """Return the bytes in use on the first device; 0 without ``nvidia-smi``."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.check_output(query, text=True)) << 20 if shutil.which(query[0]) else 0


def _is_installed(package: str) -> bool:
    # Not one of the kit's stand-ins.
    found = importlib.util.find_spec(package)
    return found is not None and not str(found.origin).startswith(str(STAND_INS))
