"""The run of a step: device, results folder, resumable measurements, and servers with the device's flags."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.servers import BFLOAT16, Server, draft_arguments, running, target_arguments
from tools.gpu import records
from tools.gpu.site import CUDA

Measure = Callable[[], dict[str, Any]]
# Attention backend -> package and file that contain its kernels.
KERNELS = {"fa3": ("sgl_kernel", "flash_ops*"), "flashinfer": ("flashinfer", "__init__.py")}


@dataclass(frozen=True)
class Arm:
    """A way to serve a pair; ``ours``: with our worker, not SGLang's."""

    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    ours: bool = True


BUILTIN = Arm(environment=(("SGLANG_DFLASH", "builtin"),), ours=False)


@dataclass(frozen=True)
class Run:
    """One step's run.

    Attributes:
        device: ``cuda``; or ``cpu``, where each step runs at a small size to show that it works.
        out: folder for rows, logs and traces.
        step: name of the step.
        pairs, arms: those to measure; empty for the step's own choice.
    """

    device: str
    out: Path
    step: str
    pairs: tuple[str, ...] = ()
    arms: tuple[str, ...] = ()

    @property
    def real(self) -> bool:
        return self.device == CUDA

    @property
    def backends(self) -> tuple[str, ...]:
        """Return the attention backends that can run: Triton, and those that are installed."""
        return ("triton", *filter(_is_installed, KERNELS)) if self.real else ("default",)

    def chosen(self, arms: Mapping[str, Arm], default: tuple[str, ...] = ()) -> dict[str, Arm]:
        """Return the requested arms, else those of ``default`` (empty: all), by name.

        Raises:
            KeyError: the step has no such arm.
        """
        return {name: self.fit(arms[name]) for name in self.arms or default or arms}

    def fit(self, arm: Arm) -> Arm:
        """Return what the device serves: on a CPU, SGLang's own worker runs in the rehearsal, with a narrow block."""
        if self.real or arm.ours:
            return arm
        from tests.rehearsal.run import rehearsed

        narrow = ("--speculative-num-draft-tokens", "4", "--cuda-graph-bs-decode", "1")
        variables = {**rehearsed(), "REHEARSE_BUILTIN": "1", "REHEARSE_LAUNCHES": "1"}  # the last: with CUDA's kernels
        return Arm(narrow, tuple(variables.items()), ours=False)

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


def device_memory(which: str) -> int:
    """Return the bytes of the first device that are ``used`` or ``total``; 0 without ``nvidia-smi``."""
    query = ["nvidia-smi", f"--query-gpu=memory.{which}", "--format=csv,noheader,nounits", "--id=0"]
    return int(subprocess.check_output(query, text=True)) << 20 if shutil.which(query[0]) else 0


def _is_installed(backend: str) -> bool:
    package, file = KERNELS[backend]
    found = importlib.util.find_spec(package)
    return found is not None and any(Path(str(found.origin)).parent.glob(file))
