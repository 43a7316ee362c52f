"""What every step works with: its device and output, resumable measurements, and servers with the device's flags."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.pair_servers import BFLOAT16, draft_arguments, target_arguments
from tests.support.servers import Server, running
from tools.gpu import records
from tools.gpu.unpack import CPU, CUDA, FAKE, STAND_INS

TINY_PAIRS = ("tiny-dense", "tiny-hybrid", "tiny-moe")
# The interpreter takes seconds for a step, and minutes for the graphs of a long prefill.
SMALL = (
    *("--max-total-tokens", "4096", "--context-length", "2048", "--max-mamba-cache-size", "48"),
    *("--disable-prefill-cuda-graph", "--cuda-graph-bs-decode", "2", "--skip-server-warmup"),
)
SAMPLER = ("--sampling-backend", "pytorch")
# Attention backend -> the package with its kernels, which the kit's machine lacks.
PACKAGES = {"fa3": "sgl_kernel", "flashinfer": "flashinfer"}


class Skip(Exception):
    """The step cannot run here; the text says why."""


@dataclass(frozen=True)
class Run:
    """One step's run.

    Attributes:
        device: ``cuda``, ``fake`` or ``cpu`` (:mod:`tools.gpu.unpack`).
        out: folder for rows, logs and traces.
        step: name of the step and of its module.
        pairs: pairs to measure; empty for the step's own choice.
        layers: depth of the published targets, 0 for the published one.
    """

    device: str
    out: Path
    step: str
    pairs: tuple[str, ...] = ()
    layers: int = 0

    @property
    def real(self) -> bool:
        return self.device == CUDA

    @property
    def backends(self) -> tuple[str, ...]:
        """Attention backends that can run: SGLang's Triton kernels, and those that are installed."""
        if not self.real:
            return ("triton",)
        return ("triton", *(name for name, package in PACKAGES.items() if _is_installed(package)))

    def flags(self, *, speculative: bool, backend: str = "triton") -> tuple[str, ...]:
        """Server flags that the device needs."""
        if self.device == CPU:
            return ()
        small = SMALL if self.device == FAKE else ()
        draft = ("--speculative-draft-attention-backend", backend) if speculative else ()
        return ("--attention-backend", backend, *SAMPLER, *draft, *small)

    @contextlib.contextmanager
    def serve(
        self, pair: str, *flags: str, speculative: bool = True, backend: str = "triton", **environment: str
    ) -> Iterator[Server]:
        """A tiny pair in bfloat16, with or without its drafter."""
        models = (*target_arguments(pair, BFLOAT16), *(draft_arguments(pair) if speculative else ()))
        with tempfile.TemporaryDirectory() as folder:
            command = (*models, *self.flags(speculative=speculative, backend=backend), *flags)
            with running(Path(folder), *command, **environment) as server:
                yield server

    def write(self, **row: Any) -> None:
        records.append(self.out, self.step, {"device": self.device, **row})
        print(row, flush=True)

    def finished(self, **key: Any) -> bool:
        """Whether an earlier run measured this key without an error: an interrupted step resumes there."""
        rows = (row for row in records.read(self.out, self.step) if "error" not in row)
        return any(all(row.get(name) == value for name, value in key.items()) for row in rows)

    def measure(self, key: dict[str, Any], measured: Callable[[], dict[str, Any]]) -> bool:
        """Write a row with what was measured, or with the error. False if there was one."""
        if self.finished(device=self.device, **key):
            return True
        start = time.monotonic()
        try:
            found = measured()
        except Exception as error:  # noqa: BLE001 - a server that ends, a wrong answer: each is a result
            found = {"error": told(error)}
        self.write(**key, **found, seconds=round(time.monotonic() - start, 1))
        return "error" not in found

    def measure_each(self, cells: Iterable[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]) -> bool:
        """Measure every (key, call), whatever comes of the others. False if one went wrong."""
        return not [key for key, measured in cells if not self.measure(key, measured)]


def told(error: Exception) -> str:
    """An error with the place that raised it, after the end of the server's log."""
    notes = "\n".join(getattr(error, "__notes__", ()))
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{notes}\n{place.filename}:{place.lineno}: {type(error).__name__}: {error}"[-6000:].strip()


def _is_installed(package: str) -> bool:
    """Not one of the kit's stand-ins."""
    found = importlib.util.find_spec(package)
    return found is not None and not str(found.origin).startswith(str(STAND_INS))


def main(step: str, body: Callable[[Run], bool], arguments: Sequence[str] | None = None) -> None:
    """Run a step from its command line. Exits with 1 if something went wrong, with 3 if the step cannot run here."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default=CUDA)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pairs", default="")
    parser.add_argument("--layers", type=int, default=0)
    asked = parser.parse_args(arguments)
    run = Run(asked.device, asked.out, step, tuple(filter(None, asked.pairs.split(","))), asked.layers)
    try:
        raise SystemExit(0 if body(run) else 1)
    except Skip as reason:
        run.write(skipped=str(reason))
        raise SystemExit(3) from None
